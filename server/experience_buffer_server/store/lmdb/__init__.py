"""The store over LMDB: the owner's side, the writer process, and what lies on the disk."""
