"""The server's HTTP side: health, metrics, the page, and the same answers as gRPC gives as JSON."""
