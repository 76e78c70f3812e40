"""What is handed out: offers, queues, leases, and how they end."""
