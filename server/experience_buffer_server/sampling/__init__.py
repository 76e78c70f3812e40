"""What is delivered to whom: units, ready queues and leases. Pure logic: no I/O, no gRPC, no clock."""
