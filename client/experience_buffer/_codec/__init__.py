"""TRXP payloads: frames, tensors, and metadata read as plain data."""
