"""A batch of changes that commit together, in terms that every engine knows.

Rows become bytes when they are noted: their owner may change them right after. Payloads stay as they
are, uncopied, and must not change. Keys, checksums and room are the engine's business.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.payload import Payload
from experience_buffer_server.store.record import Record
from experience_buffer_server.store.row_codec import Pack
from experience_buffer_server.store.rows import (
    MAX_KEY_BYTES,
    AdvantageRow,
    BufferRow,
    ConsumerRow,
    GroupRow,
    LeaseRow,
    ProgressRow,
)

_MAX_REMEMBERED_BYTES = 506
"""Longest kind and key of a remembered value, together."""


class Kind(IntEnum):
    """What an operation changes, and what its key and value are.

    A value of None removes the row. Encoded rows are those of `row_codec`.
    """

    BUFFER = 1
    """0; its encoded row."""
    PAYLOAD = 2
    """Uid; the `Payload`. Its record comes right behind it."""
    RECORD = 3
    """Seq; the encoded record."""
    GROUP = 4
    """Id; the encoded row."""
    LEASE = 5
    """Id; the encoded row."""
    PROGRESS = 6
    """Seq; the encoded row."""
    ADVANTAGES = 7
    """Seq; the encoded row."""
    MAGNITUDE = 8
    """Seq; a float."""
    CONSUMER = 9
    """Name; the encoded row."""
    LAST_SEQ = 10
    """0; a number."""
    NEW_RECORD = 11
    """As `RECORD`, but nothing of the batch is stored where the seq is taken."""
    EXPERIENCE = 12
    """Seq; None. Record, progress, what was computed, and the payload of the uid that is the value."""
    REMEMBERED = 13
    """Kind and key; time in seconds since the Unix epoch, and the value."""
    WHOLE_BUFFER = 14
    """0; None. Every row of it."""
    DEPARTED = 15
    """Seq; uid, and a note. Its record and progress become a row of what has left; the rest stays."""
    UID_FREED = 16
    """Seq; uid. The payload of what has left is kept under another key: its uid is to be used again."""
    ARCHIVED = 17
    """Seq; uid. The row of what has left, its payload, and what was computed."""


# Plain numbers: they are made and compared for every row.
_BUFFER, _PAYLOAD, _RECORD, _GROUP, _LEASE, _PROGRESS, _ADVANTAGES, _MAGNITUDE, _CONSUMER = map(
    int, list(Kind)[:9]
)
_LAST_SEQ, _NEW_RECORD, _EXPERIENCE, _REMEMBERED, _WHOLE_BUFFER = map(int, list(Kind)[9:14])
_DEPARTED, _UID_FREED, _ARCHIVED = map(int, list(Kind)[14:])

Operation: TypeAlias = tuple[int, int, Any, Any]
"""Of a `Kind`: the buffer's id, key and value."""


class WriteBatch:
    """Changes to one store that commit together or not at all, in the order given.

    Each verb only notes the change; nothing is stored before `Store.commit`. It must not be used any
    more once it has been committed. Not thread-safe.

    A verb raises ValueError, and notes nothing, for a key too long for any store.

    Args:
        pack: Encodes rows.
    """

    __slots__ = ("_pack", "has_appends", "numbers", "operations")

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self.operations: list[Operation] = []
        self.has_appends = False
        """Whether it brings experiences: such a batch is refused while others still have room."""
        self.numbers: dict[int, int] = {}
        """Of the commit in each claimed buffer that it changes, by the buffer's id; known once it is
        submitted. See `interface.Store.last_number`."""

    def put_buffer(self, row: BufferRow) -> None:
        """Insert or replace a buffer's row."""
        self.operations.append((_BUFFER, row.id, 0, row_codec.encode_buffer(row, self._pack)))

    def put_last_seq(self, buffer_id: int, last_seq: int) -> None:
        """Note that seqs and priorities' numbers up to this one were given."""
        self.operations.append((_LAST_SEQ, buffer_id, 0, last_seq))

    def delete_buffer(self, buffer_id: int) -> None:
        """Remove a buffer's row and every row of it; its id isn't given again."""
        self.operations.append((_WHOLE_BUFFER, buffer_id, 0, None))

    def append(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Insert a new experience: its record and, unless it is a tombstone, its payload under its uid.

        Nothing of the batch is stored where its seq is taken.
        """
        self._place(_NEW_RECORD, buffer_id, record, payload)

    def replace(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Replace an experience's record and payload; what was computed for it stays."""
        self._place(_RECORD, buffer_id, record, payload)

    def _place(self, kind: int, buffer_id: int, record: Record, payload: Payload) -> None:
        value = row_codec.encode_record(record, self._pack)
        if not record.tombstone:
            check_key(record.uid)
            self.operations.append((_PAYLOAD, buffer_id, record.uid, payload))
        self.operations.append((kind, buffer_id, record.seq, value))
        self.has_appends = True

    def put_record(self, buffer_id: int, record: Record) -> None:
        """Replace an experience's record; its payload stays."""
        value = row_codec.encode_record(record, self._pack)
        self.operations.append((_RECORD, buffer_id, record.seq, value))

    def put_group(self, buffer_id: int, row: GroupRow) -> None:
        """Insert or replace a group's row."""
        value = row_codec.encode_group(row, self._pack)
        self.operations.append((_GROUP, buffer_id, row.id, value))

    def delete_group(self, buffer_id: int, group_id: int) -> None:
        """Remove a group's row."""
        self.operations.append((_GROUP, buffer_id, group_id, None))

    def put_advantages(self, buffer_id: int, row: AdvantageRow, *, magnitude: float = 0.0) -> None:
        """Insert or replace what was computed for one experience.

        `magnitude`, the mean of |advantage|, is what the start needs of it.
        """
        value = row_codec.encode_advantages(row, self._pack)
        self.operations.append((_ADVANTAGES, buffer_id, row.seq, value))
        self.operations.append((_MAGNITUDE, buffer_id, row.seq, magnitude))

    def delete_advantages(self, buffer_id: int, seq: int) -> None:
        """Remove what was computed for one experience."""
        self.operations.append((_ADVANTAGES, buffer_id, seq, None))
        self.operations.append((_MAGNITUDE, buffer_id, seq, None))

    def put_lease(self, buffer_id: int, row: LeaseRow) -> None:
        """Insert or replace a lease."""
        value = row_codec.encode_lease(row, self._pack)
        self.operations.append((_LEASE, buffer_id, row.id, value))

    def delete_lease(self, buffer_id: int, lease_id: int) -> None:
        """Forget an ended lease."""
        self.operations.append((_LEASE, buffer_id, lease_id, None))

    def put_progress(self, buffer_id: int, row: ProgressRow) -> None:
        """Insert or replace the consumers' progress with one experience."""
        value = row_codec.encode_progress(row, self._pack)
        self.operations.append((_PROGRESS, buffer_id, row.seq, value))

    def delete_progress(self, buffer_id: int, seq: int) -> None:
        """Remove the consumers' progress with one experience; `remove` does so, too."""
        self.operations.append((_PROGRESS, buffer_id, seq, None))

    def put_consumer(self, buffer_id: int, row: ConsumerRow) -> None:
        """Insert or replace what is to be known of a consumer."""
        check_key(row.name)
        value = row_codec.encode_consumer(row, self._pack)
        self.operations.append((_CONSUMER, buffer_id, row.name, value))

    def delete_consumer(self, buffer_id: int, name: str) -> None:
        """Forget a consumer that was removed."""
        check_key(name)
        self.operations.append((_CONSUMER, buffer_id, name, None))

    def remove(self, buffer_id: int, record: Record) -> None:
        """Remove an experience: payload, record, advantages, progress."""
        uid = None if record.tombstone else record.uid
        self.operations.append((_EXPERIENCE, buffer_id, record.seq, uid))

    def depart(self, buffer_id: int, record: Record, note: bytes) -> None:
        """Take an experience out, and keep all of it with a note until it is archived.

        Nobody finds it under its number or its uid any more; see `Store.departed` for who does.
        """
        self.operations.append((_DEPARTED, buffer_id, record.seq, (record.uid, note)))

    def free_uid(self, buffer_id: int, seq: int, uid: str) -> None:
        """Let the uid of what has left be used again; before the append that does."""
        self.operations.append((_UID_FREED, buffer_id, seq, uid))

    def archived(self, buffer_id: int, seq: int, uid: str) -> None:
        """Remove what has left for good; without effect where it is gone already."""
        self.operations.append((_ARCHIVED, buffer_id, seq, uid))

    def remember(self, buffer_id: int, kind: str, key: str, value: bytes, time: float) -> None:
        """Keep `value` under (`kind`, `key`) until it is pruned: the digest of a removed uid, say.

        Raises:
            ValueError: `kind` holds a NUL, kind and key together exceed 506 bytes, or `time`
                is negative or not a number.
        """
        check_remembered(kind, key)
        if not time >= 0:
            raise ValueError(f"time {time!r} is not a number of seconds since the Unix epoch")
        self.operations.append((_REMEMBERED, buffer_id, (kind, key), (time, value)))


def check_key(key: str) -> None:
    """Refuse a uid or name that no store takes.

    Raises:
        ValueError: It is too long.
    """
    # No character takes more than 4 bytes.
    if len(key) > MAX_KEY_BYTES // 4 and (size := len(key.encode())) > MAX_KEY_BYTES:
        raise ValueError(f"key of {size} bytes; the store takes {MAX_KEY_BYTES}: {key!r}")


def check_remembered(kind: str, key: str) -> None:
    """Refuse what nothing can be remembered under.

    Raises:
        ValueError: `kind` holds a NUL, or both are too long together.
    """
    if "\0" in kind:
        raise ValueError(f"kind {kind!r} holds a NUL character")
    size = len(kind) + len(key)
    if size > _MAX_REMEMBERED_BYTES // 4 and (size := len((kind + key).encode())) > (
        _MAX_REMEMBERED_BYTES
    ):
        raise ValueError(
            f"kind and key of {size} bytes; the store takes {_MAX_REMEMBERED_BYTES}: {key!r}"
        )
