"""What can still be read of a large payload that is damaged or goes aside."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from experience_buffer_server.store.interface import StoreFailedError
from experience_buffer_server.store.lmdb.disk.format import Extent
from experience_buffer_server.store.lmdb.large.payload_file import NAME, PayloadReader

_PIECE_BYTES: Final = 64 * 1024
"""Lost at once where the disk can't read a block; whole blocks."""


def check_readable(folder: Path) -> None:
    """Refuse a file of large payloads that is there and can't be opened: that isn't damage.

    Raises:
        StoreFailedError: It can't be opened.
    """
    try:
        os.close(os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        pass  # There need not be one; payloads that should be in it are found to be missing.
    except OSError as error:
        raise StoreFailedError(
            f"can't open {folder / NAME}, which holds the store's large payloads: "
            f"{error.strerror}; let this user read it"
        ) from error


class Salvage:
    """Reads what there is, whether it is sound or not. Belongs to one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = PayloadReader(folder)

    def read(self, extent: Extent) -> tuple[bytes, int]:
        """What lies at an extent, and how many bytes of it could be read.

        Where the disk fails it has zeros, and it ends where the file does; it is empty where nothing
        can be read.
        """
        try:
            size = self._path.stat().st_size
        except OSError:
            return b"", 0
        num_bytes = min(extent.num_bytes, size - extent.offset)
        if num_bytes <= 0:
            return b"", 0
        try:
            with self._file.read(extent.offset, num_bytes) as payload:
                return bytes(payload), num_bytes
        except OSError:
            return self._in_pieces(extent.offset, num_bytes)

    def _in_pieces(self, offset: int, num_bytes: int) -> tuple[bytes, int]:
        content, num_read = bytearray(num_bytes), 0
        for place in range(0, num_bytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, num_bytes - place)
            # A piece that can't be read stays zeros.
            with suppress(OSError), self._file.read(offset + place, count) as piece:
                content[place : place + count] = piece
                num_read += count
        return bytes(content) if num_read else b"", num_read

    def close(self) -> None:
        """Release the file. Idempotent."""
        self._file.close()
