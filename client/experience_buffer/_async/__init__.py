"""The asynchronous client's verbs, streams and writers."""
