"""Large payloads of a snapshot: its `payloads.bin` has them where the store's has them.

Only what the rows of the snapshot's own `data.mdb` name is copied; everything else is a hole, which
takes no room. Read and written past the page cache, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import lmdb

from experience_buffer_server.runtime.memory_arena import whole_blocks
from experience_buffer_server.store.interface import DamagedRecordError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table, unseal
from experience_buffer_server.store.lmdb.disk.opening import at_rest
from experience_buffer_server.store.lmdb.disk.private_files import sync
from experience_buffer_server.store.lmdb.large.payload_file import (
    NAME,
    PayloadReader,
    PayloadWriter,
    unreadable,
)

Run = tuple[int, int]
"""Offset and bytes of whole blocks that lie together."""
_PIECE_BYTES = 4 << 20


def named_runs(txn: lmdb.Transaction[memoryview], extents: lmdb._Database) -> list[Run]:
    """What the rows of table `EXTENTS` name, in the order of the file, neighbours joined.

    Raises:
        DamagedRecordError: A row isn't as it was written.
    """
    found: list[Run] = []
    with txn.cursor(extents) as cursor:
        for key, stored in cursor:
            try:
                extent = disk.decode_extent(unseal(Table.EXTENTS, key, stored))
            except DamagedRecordError as error:
                name = disk.row_name(Table.EXTENTS, bytes(key))
                raise DamagedRecordError(f"{name} can't be read back: {error}") from error
            found.append((extent.offset, whole_blocks(extent.num_bytes)))
    return _joined(found)


def _joined(runs: Iterable[Run]) -> list[Run]:
    joined: list[Run] = []
    for offset, num_bytes in sorted(runs):
        if joined and offset <= sum(joined[-1]):
            begin, length = joined[-1]
            joined[-1] = (begin, max(length, offset + num_bytes - begin))
        else:
            joined.append((offset, num_bytes))
    return joined


def copy_payloads(source: Path, to: Path, on_progress: Callable[[int], None] | None = None) -> int:
    """Copy the large payloads that `to`/data.mdb names, and have them on the disk.

    Nobody writes to `to`, and what its rows name isn't written over in `source` meanwhile. Where
    they name nothing there will be no file.

    Args:
        source: The folder of the `payloads.bin` that has them.
        to: The folder of the copy.
        on_progress: Told of the bytes copied so far.

    Returns:
        Bytes copied: what the file takes on the disk.

    Raises:
        DamagedRecordError: A row is damaged, or the source is lost, cut short, or not readable.
        StoreFailedError: The rows can't be read, or the source can't be opened.
        OSError: The copy can't be written, such as for want of room.
    """
    with at_rest(to) as (txn, tables):
        runs = named_runs(txn, tables[Table.EXTENTS])
    if not runs:
        return 0
    _check_length(source / NAME, sum(runs[-1]))
    done = 0
    with closing(PayloadReader(source)) as reader, closing(PayloadWriter(to)) as writer:
        for offset, num_bytes in (piece for run in runs for piece in _pieces(*run)):
            with ExitStack() as stack:
                try:
                    piece = stack.enter_context(reader.read(offset, num_bytes))
                except OSError as error:
                    raise unreadable(_unread(source / NAME), error) from error
                writer.write([(offset, piece)])
            done += num_bytes
            if on_progress is not None:
                on_progress(done)
        writer.sync()
    sync(to / NAME)
    return done


def payloads_bytes(folder: Path) -> int:
    """Size of a folder's `payloads.bin`, holes included; 0: there is none."""
    try:
        return (folder / NAME).stat().st_size
    except FileNotFoundError:
        return 0


def _pieces(offset: int, num_bytes: int) -> Iterable[Run]:
    end = offset + num_bytes
    return ((begin, min(_PIECE_BYTES, end - begin)) for begin in range(offset, end, _PIECE_BYTES))


def _check_length(path: Path, end: int) -> None:
    """Refuse what lies behind the end of a file: reading it gives nothing, and no error.

    Raises:
        DamagedRecordError: The file is missing or cut short.
        StoreFailedError: It can't be looked at.
    """
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise unreadable(_unread(path), error) from error
    if num_bytes < end:
        raise DamagedRecordError(
            f"{path} is cut short: it has {num_bytes} bytes, its payloads reach to {end}"
        )


def _unread(path: Path) -> str:
    return f"the large payloads in {path} can't be read"
