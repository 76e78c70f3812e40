"""From a batch of changes to what the writer process does to its tables: keys, values, room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from experience_buffer_server.runtime.memory_arena import Buffer
from experience_buffer_server.store.batch import Kind, Operation
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import Table
from experience_buffer_server.store.lmdb.writer_protocol import (
    DELETE_BUFFER,
    INSERT_RECORD,
    LARGE_BYTES,
    REMEMBER,
    REMOVE,
    SentOperation,
)
from experience_buffer_server.store.payload import Payload, Scattered

_NUMBERED: Final[dict[int, int]] = {
    Kind.RECORD: Table.RECORDS,
    Kind.NEW_RECORD: INSERT_RECORD,
    Kind.GROUP: Table.GROUPS,
    Kind.LEASE: Table.LEASES,
    Kind.PROGRESS: Table.PROGRESS,
    Kind.ADVANTAGES: Table.ADVANTAGES,
}
"""Tables (or codes in their place) whose keys are numbers, and whose values need no translation."""
_RECORD_ROOM_BYTES: Final = 512
"""Room to allow for an index row and its share of half-full pages."""
_PAYLOADS: Final = int(Table.PAYLOADS)
_PAYLOAD: Final = int(Kind.PAYLOAD)
_EXPERIENCE: Final = int(Kind.EXPERIENCE)
_NEW_RECORD: Final = int(Kind.NEW_RECORD)
_REMEMBERED: Final = int(Kind.REMEMBERED)


class Translation:
    """Operations as the writer process takes them.

    Args:
        operations: Those of a `WriteBatch`.
    """

    __slots__ = ("append_bytes", "checksums", "direct_bytes", "large", "operations")

    def __init__(self, operations: Iterable[Operation]) -> None:
        self.operations: list[SentOperation] = []
        self.large: list[Sequence[Buffer]] = []
        """Values that the operations have only the lengths of, in their order; each as its pieces."""
        self.checksums: list[bytes] = []
        """Of these, as `payload.checksum` makes them; empty where one isn't known."""
        self.append_bytes = 0
        """Estimate of what the appends take on disk."""
        self.direct_bytes = 0
        """Of payloads that go past the page cache."""
        add = self.operations.append
        is_placed = False
        for kind, buffer_id, key, value in operations:
            table = _NUMBERED.get(kind)
            if table is not None:
                add((int(table), disk.numbered_key(buffer_id, key), value))
                if is_placed or kind == _NEW_RECORD:
                    self.append_bytes += _RECORD_ROOM_BYTES
                is_placed = False
            elif kind == _PAYLOAD:
                self._add_payload(disk.payload_key(buffer_id, key), value)
                is_placed = True
            elif kind == _EXPERIENCE:
                place = b"" if value is None else disk.payload_key(buffer_id, value)
                add((REMOVE, disk.numbered_key(buffer_id, key), place))
            elif kind == _REMEMBERED:
                # As often as experiences are consumed.
                place = disk.memory_key(buffer_id, *key)
                add((REMEMBER, place, disk.encode_memory(*value)))
            else:
                self._add_other(Kind(kind), buffer_id, key, value)

    def _add_payload(self, place: bytes, payload: Payload) -> None:
        num_bytes = len(payload)
        # Half a page and more starts pages of its own; counting one more for all is close.
        self.append_bytes += (num_bytes // disk.PAGE_BYTES + 1) * disk.PAGE_BYTES
        if num_bytes < LARGE_BYTES:
            self.operations.append((_PAYLOADS, place, bytes(payload)))
            return
        self.operations.append((_PAYLOADS, place, num_bytes))
        if not isinstance(payload, Scattered):
            payload = Scattered([payload])
        self.large.append(payload.parts)
        self.checksums.append(payload.checksum)
        if num_bytes >= disk.LARGE_PAYLOAD_BYTES:
            self.direct_bytes += num_bytes

    def _add_other(self, kind: Kind, buffer_id: int, key: object, value: object) -> None:
        add = self.operations.append
        match kind, key, value:
            case Kind.BUFFER, _, bytes():
                for table in (Table.BUFFERS, Table.BUFFER_COPIES):
                    add((int(table), disk.buffer_key(buffer_id), value))
            case Kind.MAGNITUDE, int(), float() | int() | None:
                encoded = None if value is None else disk.encode_magnitude(value)
                add((int(Table.MAGNITUDES), disk.numbered_key(buffer_id, key), encoded))
            case Kind.CONSUMER, str(), bytes() | None:
                add((int(Table.CONSUMERS), disk.named_key(buffer_id, key), value))
            case Kind.LAST_SEQ, _, int():
                encoded = disk.encode_counter(value)
                add((int(Table.COUNTERS), disk.buffer_key(buffer_id), encoded))
            case Kind.WHOLE_BUFFER, _, _:
                add((DELETE_BUFFER, disk.buffer_key(buffer_id), None))
            case _:
                raise TypeError(f"no operation: {kind!r} of {key!r} and {type(value).__name__}")
