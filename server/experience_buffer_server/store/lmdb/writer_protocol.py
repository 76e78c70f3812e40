"""What the owner of a store and its writer process say to each other, over a local socket.

Owner to writer: a `Request` per batch, as a frame of its own: the sizes of its parts, a msgpack
document, and the large values one after the other, each with room for its seal. The document has
their lengths in their places: so they are neither packed nor unpacked, and sealed where they lie.
Values that are in the `outbox` stay there, and the document says where.
What a batch says becomes keys and values of tables here, on the owner's side (`Translation`).
Writer to owner: first a `Ready`, then a `Reply` per transaction, each with its length (4 bytes, big
endian) before a msgpack document. Both ends are the same program on the same machine: frames are
not validated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgpack

from experience_buffer_server.runtime.memory_arena import Buffer, Place, whole_blocks
from experience_buffer_server.store import batch
from experience_buffer_server.store.batch import Kind
from experience_buffer_server.store.lmdb.disk import format as disk
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, Table
from experience_buffer_server.store.lmdb.large.payload_file import Aligned
from experience_buffer_server.store.payload import LARGE_PAYLOAD_BYTES, Payload, Scattered

LENGTH = struct.Struct("!I")
PARTS = struct.Struct("!III")
"""Bytes of a request's document, of its large values with their room, and of those in the outbox."""

LARGE_BYTES = 16 * 1024
"""Values from this size on travel beside the document; for smaller ones copying is cheaper."""
_ROOM = bytes(SEAL_BYTES)

DELETE_BUFFER = -1
"""In place of a table: the key is a buffer's prefix; all its rows go."""
PRUNE = -2
"""In place of a table: the key is a buffer's prefix, the value `PRUNE_LIMITS`."""
INSERT_RECORD = -3
"""In place of a table: a row of table records, whose key must not be taken."""
REMOVE = -4
"""In place of a table: the key is that of an experience's numbered rows, the value its payload's key;
empty: it has none. All its rows go."""
REMEMBER = -5
"""In place of a table: a row of table memory, which is entered into the log, too."""

CLAIM = -6
"""In place of a table: the key is a buffer's prefix; who owned it before is refused from now on."""

DEPART = -7
"""In place of a table: the key is that of an experience's numbered rows, the value `DEPARTURE` and what
it packs. Its record and progress become a row of what has left."""
FREE_UID = -8
"""In place of a table: the same key, the value its payload's key, which another experience gets."""
ARCHIVED = -9
"""In place of a table: the same key, the value its payload's key. All of what has left goes."""

DEPARTURE = struct.Struct("!H")
"""Bytes of the payload's key, which follows and before the note."""
PRUNE_LIMITS = struct.Struct("!dQ")
"""Instant in seconds since the epoch, and the most values to forget."""


SentOperation = tuple[int, bytes, Buffer | int | None]
"""Table (or a code above), key, value; None deletes the key, an int is a large value's length."""
Operation = tuple[int, bytes, bytes | memoryview | Aligned | None]
"""The same as the writer has it: a large value is a view of the frame, with room for its seal, or `Aligned`."""

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
_DEPARTED: Final = int(Kind.DEPARTED)
_ARCHIVED: Final = int(Kind.ARCHIVED)


class Status(IntEnum):
    """How a batch, or the opening, ended."""

    OK = 0
    FULL = 1
    """No room; nothing of the batch is stored."""
    REFUSED = 2
    """The store can't hold what the batch says; nothing of it is stored."""
    FAILED = 3
    """The writer can't go on and ends."""
    FORMAT = 4
    """The directory holds another store."""
    BUSY = 5
    """Another writer has the directory."""
    FENCED = 6
    """Another owner has claimed the buffer; nothing of the batch is stored."""


class Stamp(NamedTuple):
    """What a batch says of a buffer that it changes."""

    buffer_id: int
    epoch: int
    """With which its owner has claimed the buffer."""
    number: int
    """Of the commit, see `interface.Store.last_number`."""


class Request(NamedTuple):
    """A batch to write."""

    number: int
    append_bytes: int
    """Estimate of what its appends take on disk; 0: none, the batch may use the last room."""
    operations: list[Operation]
    stamps: Sequence[Stamp] = ()
    """Of the buffers that somebody has claimed; others aren't fenced."""


class Result(NamedTuple):
    """How one batch ended."""

    number: int
    status: int
    message: str = ""
    answer: int = 0
    """Values that its prunes forgot; of a claim, the new epoch."""


class Work(NamedTuple):
    """What the writer did since its last reply, and how full the store is."""

    num_transactions: int = 0
    num_batches: int = 0
    num_operations: int = 0
    apply_seconds: float = 0.0
    """Time in puts and deletes."""
    commit_seconds: float = 0.0
    """Time in commits: writing and, if durability is "commit", fsync."""
    live_bytes: int = 0
    """Pages that held rows when they were last counted: half a second after a commit, or near the limit."""
    file_bytes: int = 0
    """Pages that were ever in use; the difference can be reused."""
    map_bytes: int = 0
    """Current size of the map."""


class Ready(NamedTuple):
    """The writer's first word."""

    status: int
    message: str = ""


class Reply(NamedTuple):
    """After each turn of the writer: results in the order of submission."""

    results: list[Result]
    work: Work


class Translation:
    """Operations as the writer process takes them.

    Args:
        operations: Those of a `WriteBatch`.
    """

    __slots__ = ("append_bytes", "checksums", "direct_bytes", "large", "operations")

    def __init__(self, operations: Iterable[batch.Operation]) -> None:
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
            elif kind == _DEPARTED:
                uid, note = value
                place = disk.payload_key(buffer_id, uid)
                value = DEPARTURE.pack(len(place)) + place + note
                add((DEPART, disk.numbered_key(buffer_id, key), value))
            elif kind == _ARCHIVED:
                place = disk.payload_key(buffer_id, value)
                add((ARCHIVED, disk.numbered_key(buffer_id, key), place))
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
        if num_bytes >= LARGE_PAYLOAD_BYTES:
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
            case Kind.UID_FREED, int(), str():
                place = disk.payload_key(buffer_id, value)
                add((FREE_UID, disk.numbered_key(buffer_id, key), place))
            case Kind.WHOLE_BUFFER, _, _:
                add((DELETE_BUFFER, disk.buffer_key(buffer_id), None))
            case _:
                raise TypeError(f"no operation: {kind!r} of {key!r} and {type(value).__name__}")


def encode(document: Ready | Reply) -> bytes:
    """A frame with its length."""
    body: bytes = msgpack.packb(document)
    return LENGTH.pack(len(body)) + body


def decode_ready(body: bytes) -> Ready:
    """Read the writer's first frame."""
    return Ready(*msgpack.unpackb(body))


def decode_reply(body: bytes) -> Reply:
    """Read one of the writer's later frames."""
    results, work = msgpack.unpackb(body)
    return Reply([Result(*result) for result in results], Work(*work))


def encode_request(
    number: int,
    append_bytes: int,
    operations: Sequence[SentOperation],
    *,
    large: Sequence[Sequence[Buffer]] = (),
    lent: Sequence[Place | None] = (),
    checksums: Sequence[bytes] = (),
    stamps: Sequence[Stamp] = (),
    pack: Callable[[Any], bytes],
) -> list[Buffer]:
    """The pieces of a frame, to be sent one after the other.

    Args:
        number: Of the batch.
        append_bytes: See `Request`.
        operations: What to write.
        large: The large values in the order of the operations, each as what it is joined of; they must
            not change any more.
        lent: Where in the outbox each of them is; None: nowhere. Empty: none of them is.
        checksums: Of those that are there, as `payload.checksum` makes them; an empty one isn't known.
            Empty: none is known.
        stamps: See `Request`.
        pack: Of a msgpack packer.
    """
    known = checksums or [b""] * len(lent)
    places = [
        None if place is None else (place.start, checksum)
        for place, checksum in zip(lent, known, strict=True)
    ]
    document = pack((number, append_bytes, operations, places, stamps))
    sent: list[Buffer] = []
    for value, place in zip(large, lent or [None] * len(large), strict=True):
        if place is None:
            sent += (*value, _ROOM)
    return [PARTS.pack(len(document), sum(map(len, sent)), lent_bytes(lent)), document, *sent]


def lent_bytes(lent: Iterable[Place | None]) -> int:
    """What values take in the outbox."""
    return sum(place.end - place.start for place in lent if place is not None)


def decode_request(document: Buffer, large: memoryview, outbox: memoryview) -> Request:
    """Read one of the owner's frames; see `Operation` for its large values."""
    number, append_bytes, operations, places, stamps = msgpack.unpackb(document)
    if large or places:
        lent = iter(places)
        start = 0
        for index, (table, key, value) in enumerate(operations):
            if type(value) is not int:
                continue
            place = next(lent, None)
            if place is None:
                end = start + value + SEAL_BYTES
                operations[index] = (table, key, large[start:end])
                start = end
            else:
                begin, checksum = place
                blocks = outbox[begin : begin + whole_blocks(value)]
                operations[index] = (table, key, Aligned(blocks[:value], blocks, checksum))
    return Request(number, append_bytes, operations, [Stamp(*stamp) for stamp in stamps])
