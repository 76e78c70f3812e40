"""Channels, retries, memory shared with a server, queues of pushes: what both clients stand on."""
