"""Reading large payloads: one, compared with its checksum; or many side by side, for `is_as_written`.

A row in `EXTENTS` says where each lies, and has its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

from experience_buffer_server.runtime.memory_arena import whole_blocks
from experience_buffer_server.store.interface import DamagedRecordError, StoreFailedError
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Extent, Table
from experience_buffer_server.store.lmdb.large.payload_file import NAME, PayloadReader, unreadable
from experience_buffer_server.store.payload import checksum

MOST_AT_ONCE_BYTES: Final = 4 << 20
"""Of neighbours in one read: what more brings is little, and all of it is kept until the last is used."""
_GAP_BYTES: Final = 256 << 10
"""Between neighbours that are read at once: less than that takes longer to leave out than to read. It is
one more of a usual size, where two ranks share the units of a lease."""
Place: TypeAlias = tuple[bytes, Extent]
"""Key and extent of a payload. The extent's checksum sees to it that nothing else is taken for it."""


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


class Together:
    """Payloads that were read at once, unchecked, until each is released. For one thread at a time.

    Args:
        payloads: In the order in which they lie; or why one can't be read.
        memory: Gives back what they were read into.
    """

    def __init__(self, payloads: list[memoryview | DamagedRecordError], memory: ExitStack) -> None:
        self.payloads = payloads
        self._memory = memory
        self._num_held = len(payloads)

    def release(self, number: int) -> None:
        """End the view of one, to be called once for each; the last one gives the memory back."""
        payload = self.payloads[number]
        if isinstance(payload, memoryview):
            try:
                payload.release()
            except BufferError:
                return  # Somebody still looks at it: the memory isn't used again.
        self._num_held -= 1
        if not self._num_held:
            self._memory.close()


class LargePayloads:
    """The large payloads of one store. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._file = PayloadReader(folder)

    @contextmanager
    def read(self, key: bytes, extent: Extent) -> Iterator[memoryview]:
        """Read a payload; blocks for the disk.

        Whoever reads holds the transaction in which the row was found: what it says isn't written
        over while it is open.

        Args:
            key: That of its row.
            extent: What the row says.

        Returns:
            A view, valid within the block.

        Raises:
            DamagedRecordError: The disk can't read it, or it isn't what was written.
            StoreFailedError: It can't be read now: for want of memory or file descriptors, say.
        """
        with ExitStack() as stack:
            try:
                payload = stack.enter_context(self._file.read(extent.offset, extent.num_bytes))
            except OSError as error:
                raise _unreadable(key, error) from error
            if not is_as_written((key, extent), payload):
                raise DamagedRecordError(
                    f"{_name(key)} can't be read back: its {extent.num_bytes} bytes at "
                    f"{extent.offset} of {NAME} don't match their checksum"
                )
            yield payload

    def fetch(self, neighbours: Sequence[Place]) -> Together:
        """Read payloads that lie side by side at once, without a look at them; blocks for the disk.

        No transaction need be open: what is read may be written over meanwhile, which `is_as_written`
        tells. Nothing is checked here, since that would have a thread wait for the interpreter once
        more for each of them.

        Args:
            neighbours: See `side_by_side`.

        Returns:
            The payloads; a disk that can't read one of them costs the others only time.

        Raises:
            StoreFailedError: They can't be read now: for want of memory or file descriptors, say.
        """
        with ExitStack() as stack:
            found: list[memoryview | DamagedRecordError] = []
            if len(neighbours) > 1:
                begin = neighbours[0][1].offset
                with suppress(OSError):
                    view = stack.enter_context(self._file.read(begin, span_bytes(neighbours)))
                    for _, (offset, num_bytes, _) in neighbours:
                        found.append(view[offset - begin : offset - begin + num_bytes])
            found = found or [self._fetch_one(place, stack) for place in neighbours]
            return Together(found, stack.pop_all())

    def _fetch_one(self, place: Place, stack: ExitStack) -> memoryview | DamagedRecordError:
        key, (offset, num_bytes, _) = place
        try:
            return stack.enter_context(self._file.read(offset, num_bytes))
        except OSError as error:
            reason = _unreadable(key, error)
            if isinstance(reason, DamagedRecordError):
                return reason
            raise reason from error

    def close(self) -> None:
        """Release the file. Idempotent."""
        self._file.close()


def side_by_side(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Payloads in the order in which they lie in the file, those together that are best read at once."""
    neighbours: list[Place] = []
    begin = end = 0
    for place in sorted(places, key=_offset):
        offset, num_bytes, _ = place[1]
        if neighbours and (
            not end <= offset <= end + _GAP_BYTES or offset + num_bytes - begin > MOST_AT_ONCE_BYTES
        ):
            yield neighbours
            neighbours = []
        if not neighbours:
            begin = offset
        neighbours.append(place)
        end = offset + whole_blocks(num_bytes)
    if neighbours:
        yield neighbours


def span_bytes(neighbours: Sequence[Place]) -> int:
    """What is read for payloads side by side, gaps included."""
    last = neighbours[-1][1]
    return last.offset + last.num_bytes - neighbours[0][1].offset


def is_as_written(place: Place, payload: memoryview) -> bool:
    """Whether what was read is what was stored there."""
    _, extent = place
    return checksum(payload) == extent.checksum


def _offset(place: Place) -> int:
    return place[1].offset


def _unreadable(key: bytes, error: OSError) -> DamagedRecordError | StoreFailedError:
    return unreadable(f"{_name(key)} can't be read from {NAME}", error)


def _name(key: bytes) -> str:
    return disk.row_name(Table.PAYLOADS, key)
