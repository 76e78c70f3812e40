"""The file of large payloads beside LMDB: where each lies, how it is written and read."""
