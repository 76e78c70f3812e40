"""What is durable: the rows, the batch of changes that commits together, and the store's interface.

Nothing here knows LMDB. A store keeps rows and bytes; it has no opinion on groups, leases or
sampling. The owner of a buffer decides, writes one `WriteBatch` and waits for its commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from experience_buffer_server.store.payload import Payload as Payload
from experience_buffer_server.store.payload import Scattered as Scattered
from experience_buffer_server.store.record import OTHER_DIGEST as OTHER_DIGEST
from experience_buffer_server.store.record import Record as Record
from experience_buffer_server.store.record import cut_of as cut_of

_T = TypeVar("_T")

MAX_KEY_BYTES = 500
"""Longest uid or group key that can be stored, in bytes of UTF-8."""
LARGE_PAYLOAD_BYTES = 64 * 1024
"""Payloads from this size on have to be read from the disk; see `Store.fetched`."""
LEASES_PER_SECOND: Final = 1 << 20
"""More than any buffer gives; ids stay below 2^53, which every language counts exactly, until 2242."""
MAX_PRIORITY = 1e300
"""Larger priorities count as this one: sums over a group's members stay finite."""


class StoreError(Exception):
    """The store could not do what was asked; nothing of the batch is stored."""


class StoreFullError(StoreError):
    """No room: the disk is full or the configured map limit is reached. Removals still work."""


class StoreFailedError(StoreError):
    """The store can't go on (I/O error, writer process gone); the server must restart."""


class StoreFormatError(StoreError):
    """The directory holds a store of another format version, or no store at all."""


class DamagedRecordError(StoreError):
    """A stored row can't be read back; the message names it."""


Found: TypeAlias = _T | DamagedRecordError | None
"""What one read of several brings: the row, None where there is none, or why it can't be read.

A damaged row is a value, not raised: it costs its neighbours nothing."""


@dataclass(slots=True, kw_only=True)
class BufferRow:
    """A buffer as stored."""

    id: int
    """Never reused within a store; at least 1."""
    name: str
    """Empty once it was deleted, until all of it is off the disk."""
    config: str
    """Its configuration as JSON."""
    policy_version: int | None
    create_time: float
    """Seconds since the Unix epoch."""
    moments: str = ""
    """Running moments of its rewards as JSON; empty: none yet."""

    @property
    def lease_floor(self) -> int:
        """The ids of its leases are above it.

        So they mean nothing in a buffer that takes its name later, or does in another life of the
        store: an ack would consume there what somebody else holds.
        """
        return int(self.create_time * LEASES_PER_SECOND)

    @property
    def is_deleted(self) -> bool:
        """Whether it was deleted: what is left of it is yet to be removed, and nobody's."""
        return not self.name


@dataclass(slots=True, kw_only=True)
class GroupRow:
    """A group that has, or may still get, stored members."""

    id: int
    """From 1, unique within the buffer."""
    key: str
    size: int
    """Members that make it whole; 0: not known."""
    open_time: float
    """When its first member came, seconds since the Unix epoch."""
    closed: str = ""
    """Empty while open, else why it takes no more members ("whole", "sealed", "deadline", "dropped")."""
    note: str = ""
    """The reason given when it was dropped, or why it was set aside."""
    quarantined: bool = False
    """It was set aside: rows of it were lost, and who belonged to it isn't known."""
    num_consumed: int = 0
    """Members that were consumed and removed while it was open; they count towards its size."""


@dataclass(slots=True, kw_only=True)
class LeaseRow:
    """A delivery: open, or ended and remembered so that a repeated ack is recognised."""

    id: int
    """From 1, strictly increasing within the buffer."""
    consumer: str
    units: list[list[int]]
    """Member seqs of each leased unit; empty once ended."""
    deadline: float
    """When it expires, or ended; seconds since the Unix epoch."""
    state: Literal["open", "ending", "acked", "nacked", "expired"] = "open"
    """Never stored as "ending": that is an ack on its way to the disk."""
    num_experiences: int = 0
    part_sizes: list[int] = field(default_factory=list)
    """Of a lease that ranks share: how many of the units, in order, are each rank's."""
    acked_parts: dict[int, int | None] = field(default_factory=dict)
    """Ranks that have acknowledged their part of an open lease, with the training step."""
    probabilities: list[float] = field(default_factory=list)
    """With which each of the units was chosen; empty: 1 each. Of shared leases, as is `stale`: those
    are asked for again."""
    stale: list[bool] = field(default_factory=list)
    """Which of the units are delivered marked as stale; empty: none."""


@dataclass(slots=True, kw_only=True)
class ProgressRow:
    """How far the consumers are with one experience; absent means nothing has happened."""

    seq: int
    acked: list[str] = field(default_factory=list)
    """Consumers that have consumed it, or passed it over."""
    num_deliveries: dict[str, int] = field(default_factory=dict)
    """Deliveries per consumer that ended without an ack."""
    times_sampled: dict[str, int] = field(default_factory=dict)
    """Acknowledged deliveries per consumer that replays. 0 of one that is among `acked`: it has
    passed the experience over."""
    steps: dict[str, list[int]] = field(default_factory=dict)
    """Training steps of the acks per consumer that can still be rewound."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Consumers that don't get it any more, and why."""


@dataclass(slots=True, kw_only=True)
class ConsumerRow:
    """What is to be known of a consumer beyond single experiences."""

    name: str
    safe_step: int | None = None
    """Its acks at or before it can't be rewound."""
    last_step: int | None = None
    """The highest step acknowledged, or rewound to."""
    departed_inserts: int = 0
    """Units that have left the buffer and still count as inserted for its limiter."""
    departed_samples: int = 0
    """Their deliveries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRow:
    """What was computed for one experience."""

    seq: int
    advantages: bytes
    """float32, little endian, one per response token."""
    returns: bytes
    """float32, little endian, one per response token."""
    details: dict[str, Any]
    """Estimator, parameters, group size, members present, statistics used: plain data."""


@dataclass(slots=True, kw_only=True)
class DamagedRows:
    """Numbers of a buffer's rows that can't be read back and were left out."""

    records: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    any_records: bool = False
    """Whether the store has lost a record at all: the buffer in its key may be what is damaged."""


@dataclass(slots=True, kw_only=True)
class StoredBuffer:
    """Everything that a store holds of one buffer but payloads and computed advantages."""

    row: BufferRow
    records: list[Record]
    """By seq."""
    groups: list[GroupRow]
    """By id."""
    leases: list[LeaseRow]
    """By id."""
    progress: list[ProgressRow]
    consumers: list[ConsumerRow]
    computed: Mapping[int, float]
    """Magnitudes of the experiences that have an advantage row, by seq."""
    last_seq: int = 0
    """Seqs and priorities' numbers up to here were given, also to what isn't stored any more."""
    damaged: DamagedRows = field(default_factory=DamagedRows)


class Expected(Protocol):
    """Payloads that are read ahead."""

    def close(self) -> None:
        """Those that weren't asked for won't be. Idempotent."""


class WriteBatch(Protocol):
    """Changes to one store that commit together or not at all, in the order given.

    Each verb only notes the change; nothing is stored before `Store.commit`.
    """

    def put_buffer(self, row: BufferRow) -> None:
        """Insert or replace a buffer's row."""

    def put_last_seq(self, buffer_id: int, last_seq: int) -> None:
        """Note that seqs and priorities' numbers up to this one were given."""

    def delete_buffer(self, buffer_id: int) -> None:
        """Remove a buffer's row and every row of it in every table."""

    def append(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Insert a new experience: its record and, unless it is a tombstone, its payload under its uid."""

    def replace(self, buffer_id: int, record: Record, payload: Payload) -> None:
        """Replace an experience's record and payload; what was computed for it stays."""

    def put_record(self, buffer_id: int, record: Record) -> None:
        """Replace an experience's record; its payload stays."""

    def put_group(self, buffer_id: int, row: GroupRow) -> None:
        """Insert or replace a group's row."""

    def delete_group(self, buffer_id: int, group_id: int) -> None:
        """Remove a group's row."""

    def put_advantages(self, buffer_id: int, row: AdvantageRow, *, magnitude: float = 0.0) -> None:
        """Insert or replace what was computed for one experience.

        `magnitude`, the mean of |advantage|, is what the start needs of it.
        """

    def delete_advantages(self, buffer_id: int, seq: int) -> None:
        """Remove what was computed for one experience."""

    def put_lease(self, buffer_id: int, row: LeaseRow) -> None:
        """Insert or replace a lease."""

    def delete_lease(self, buffer_id: int, lease_id: int) -> None:
        """Forget an ended lease."""

    def put_progress(self, buffer_id: int, row: ProgressRow) -> None:
        """Insert or replace the consumers' progress with one experience."""

    def delete_progress(self, buffer_id: int, seq: int) -> None:
        """Remove the consumers' progress with one experience; `remove` does so, too."""

    def put_consumer(self, buffer_id: int, row: ConsumerRow) -> None:
        """Insert or replace what is to be known of a consumer."""

    def delete_consumer(self, buffer_id: int, name: str) -> None:
        """Forget a consumer that was removed."""

    def remove(self, buffer_id: int, record: Record) -> None:
        """Remove an experience: payload, record, advantages, progress."""

    def remember(self, buffer_id: int, kind: str, key: str, value: bytes, time: float) -> None:
        """Keep `value` under (`kind`, `key`) until it is pruned: the digest of a removed uid, say."""


class Store(Protocol):
    """A durable store with one owner. All methods belong to the owner's event loop thread."""

    def batch(self) -> WriteBatch:
        """Start a batch of changes."""

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """Submit a batch now; the awaitable ends when it is on disk (`durability = "commit"`).

        Batches commit in the order of submission. Several may share one transaction.

        Raises:
            StoreFullError: No room; nothing of this batch is stored, others are not affected.
            StoreFailedError: The store can't go on.
        """

    def ride(self, batch: WriteBatch) -> Awaitable[None]:
        """Commit a small batch together with the next append, while appends come often.

        It makes that append's commit a little longer instead of letting the next one wait for a
        commit of its own. It commits before whatever is submitted later. Without appends it is
        submitted at once, or after a moment.

        Raises:
            StoreFullError: No room, for this batch or for the append; nothing of it is stored.
            StoreFailedError: The store can't go on.
        """

    @property
    def is_taking_in(self) -> bool:
        """Whether experiences are being appended now."""

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads, committed ones only."""

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[Found[AdvantageRow]]:
        """What was computed."""

    def stored(
        self, buffer_id: int, uids: Iterable[str], seqs: Iterable[int]
    ) -> AbstractContextManager[tuple[list[Found[memoryview]], list[Found[AdvantageRow]]]]:
        """Payloads, uncopied, and what was computed, of one state of the store.

        The views end with the block. Nothing else of the store is to be read within it.
        """

    def fetched(self, buffer_id: int, uids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Have in memory, within the block, those of these payloads that are large.

        What reads them there doesn't wait for the disk, which otherwise keeps the event loop. It
        changes nothing else; those that can't be read are told of where they are read.
        """

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Read large payloads ahead of the `fetched` that will ask for them, as far as there is room.

        Args:
            buffer_id: The buffer's.
            payloads: Uid and bytes of each, in the order in which they will be asked for.
        """

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values; None where nothing is remembered, or can be read back.

        What is remembered only shortens the way of repeats; a damaged one is forgotten early.
        """

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads, for a start after damage; it may take seconds."""

    def prune(self, buffer_id: int, before_time: float, *, limit: int = 1000) -> Awaitable[int]:
        """Forget up to `limit` remembered values older than `before_time`; how many were forgotten."""

    def load(self) -> Iterator[StoredBuffer]:
        """Read the state of every buffer, by id; for the start, before the first commit."""

    @property
    def last_buffer_id(self) -> int:
        """Highest id that a buffer was given, also one that is gone; known after `load`."""

    async def close(self) -> None:
        """Finish what was submitted and release the store. Idempotent."""
