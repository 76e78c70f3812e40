"""What has left a buffer and stays readable: from the store into files, and how it is found there.

Owners put what leaves into an `outbox`; the `archivist` has it written by a process of its own
(`writer_process`) and read by another (`reader_process`). Nothing here decides what leaves.
"""
