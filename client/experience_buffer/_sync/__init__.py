"""The synchronous client's verbs, streams and writers."""
