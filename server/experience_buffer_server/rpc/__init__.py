"""Between the wire and the buffers: messages, streams, statuses of errors, limits of calls, metrics."""
