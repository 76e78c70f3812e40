"""The configuration as typed values, checked where it is read: server, buffers, consumers, access."""
