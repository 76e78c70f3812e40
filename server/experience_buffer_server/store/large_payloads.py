"""Reading large payloads: each is compared with the checksum that its row in `EXTENTS` has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experience_buffer_server.store import format as disk
from experience_buffer_server.store.base import DamagedRecordError, StoreFailedError
from experience_buffer_server.store.format import Extent, Table
from experience_buffer_server.store.payload_file import DAMAGE_CODES, NAME, PayloadReader
from experience_buffer_server.store.seal import checksum


class LargePayloads:
    """The large payloads of one store. Thread-safe.

    Whoever reads holds the transaction in which the row was found: what it says isn't written over
    while it is open.
    """

    def __init__(self, folder: Path) -> None:
        self._file = PayloadReader(folder)

    @contextmanager
    def read(self, key: bytes, extent: Extent) -> Iterator[memoryview]:
        """Read a payload; blocks for the disk.

        Args:
            key: That of its row.
            extent: What the row says.

        Returns:
            A view, valid within the block.

        Raises:
            DamagedRecordError: The disk can't read it, or it isn't what was written.
            StoreFailedError: It can't be read now: for want of memory or file descriptors, say.
        """
        name = disk.row_name(Table.PAYLOADS, key)
        with ExitStack() as stack:
            try:
                payload = stack.enter_context(self._file.read(extent.offset, extent.num_bytes))
            except OSError as error:
                kind = DamagedRecordError if error.errno in DAMAGE_CODES else StoreFailedError
                raise kind(f"{name} can't be read from {NAME}: {error.strerror}") from error
            if checksum(Table.PAYLOADS, key, payload) != extent.checksum:
                raise DamagedRecordError(
                    f"{name} can't be read back: its {extent.num_bytes} bytes at {extent.offset} "
                    f"of {NAME} don't match their checksum"
                )
            yield payload

    def close(self) -> None:
        """Release the file. Idempotent."""
        self._file.close()
