"""The rows that a store keeps of a buffer, as its owner has them.

Fields are stored in their order here (`row_codec`): a new one comes last, with a default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from experience_buffer.errors import InvalidRequestError
from experience_buffer_server.store.errors import DamagedRecordError
from experience_buffer_server.store.record import Record

_T = TypeVar("_T")
_CURSOR: Final = re.compile(r"[0-9a-f]{1,20}\.([0-9]{1,20})")

FLAGS: Final = ("singleton", "zero_variance", "zero_mask", "bootstrapped", "masked")
"""Details of a computation that travel with each delivered experience."""

MAX_KEY_BYTES: Final = 500
"""Longest uid, group key or name that can be stored, in bytes of UTF-8."""
LEASES_PER_SECOND: Final = 1 << 20
"""More than any buffer gives; ids stay below 2^53, which every language counts exactly, until 2242."""
MAX_PRIORITY: Final = 1e300
"""Larger priorities count as this one: sums over a group's members stay finite."""

_MOST_TRAINED: Final = 32

Found: TypeAlias = _T | DamagedRecordError | None
"""What one read of several brings: the row, None where there is none, or why it can't be read.

A damaged row is a value, not raised: it costs its neighbours nothing."""


@dataclass(slots=True)
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

    def cursor(self, seq: int) -> str:
        """What a scan goes on by after an experience: another buffer of this name has other ones."""
        return f"{int(self.create_time * 1e6):x}.{seq}"

    def seq_of(self, cursor: str) -> int:
        """The experience that a scan goes on after; 0 where it begins.

        Raises:
            InvalidRequestError: The cursor isn't one of this buffer's.
        """
        if not cursor:
            return 0
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise InvalidRequestError(
                f"cursor {cursor[:80]!r} is not one that a scan gave", subject="cursor"
            )
        seq = int(found[1])
        if cursor != self.cursor(seq):
            raise InvalidRequestError(
                f"cursor {cursor!r} is one of another buffer {self.name!r}, which was deleted since: "
                "leave it out to begin from the beginning",
                subject="cursor",
            )
        return seq

    @property
    def is_deleted(self) -> bool:
        """Whether it was deleted: what is left of it is yet to be removed, and nobody's."""
        return not self.name


@dataclass(slots=True)
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


@dataclass(slots=True)
class LeaseRow:
    """A delivery: open, or ended and remembered so that a repeated ack is recognised."""

    id: int
    """From 1, strictly increasing within the buffer."""
    consumer: str
    units: list[list[int]]
    """Member seqs of each leased unit; empty once ended, but of one acknowledged with a training step."""
    deadline: float
    """When it expires, or ended; seconds since the Unix epoch."""
    state: Literal["open", "ending", "acked", "nacked", "expired"] = "open"
    """Never stored as "ending": that is an ack on its way to the disk."""
    num_experiences: int = 0
    part_sizes: list[int] = field(default_factory=list)
    """Of a lease that ranks share: how many of the units, in order, are each rank's."""
    acked_parts: dict[int, int | None] = field(default_factory=dict)
    """Ranks that have acknowledged their part of an open lease, with the training step. Of one that was
    acknowledged with a step, 0 and that step."""
    probabilities: list[float] = field(default_factory=list)
    """With which each of the units was chosen; empty: 1 each. Of shared leases, as is `stale`: those
    are asked for again."""
    stale: list[bool] = field(default_factory=list)
    """Which of the units are delivered marked as stale; empty: none."""


@dataclass(slots=True)
class ProgressRow:
    """How far the consumers are with one experience; absent means nothing has happened."""

    seq: int
    acked: list[str] = field(default_factory=list)
    """Consumers that have consumed it, or passed it over."""
    num_deliveries: dict[str, int] = field(default_factory=dict)
    """Deliveries per consumer that ended without an ack."""
    times_sampled: dict[str, int] = field(default_factory=dict)
    """Acknowledged deliveries per consumer that replays; 0 of one that has passed it over unused."""
    steps: dict[str, list[int]] = field(default_factory=dict)
    """Training steps of the acks per consumer that can still be rewound."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Consumers that don't get it any more, and why."""
    passed_over: list[str] = field(default_factory=list)
    """Those of `acked` that didn't want it, or not as often as they might have got it."""
    uncounted: list[str] = field(default_factory=list)
    """Those that had consumed it when their limiter's ratio changed, and can be rewound: it counts
    again when they are."""
    trained: list[list[Any]] = field(default_factory=list)
    """Acks of it: consumer, training step or None, and time in seconds since the Unix epoch. Only in
    buffers with an archive, and not of the ack with which it leaves."""

    def note_trained(self, consumer: str, step: int | None, time: float) -> None:
        """Note an ack; of very many, as of a consumer that replays, the newest stay."""
        self.trained.append([consumer, step, time])
        del self.trained[:-_MOST_TRAINED]

    def take_back(self, consumer: str, step: int | None) -> None:
        """An ack was rewound."""
        for index in range(len(self.trained) - 1, -1, -1):
            if self.trained[index][:2] == [consumer, step]:
                del self.trained[index]
                return


@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True)
class AdvantageRow:
    """What was computed for one experience."""

    seq: int
    advantages: bytes
    """float32, little endian, one per response token."""
    returns: bytes
    """float32, little endian, one per response token."""
    details: dict[str, Any]
    """Estimator, parameters, group size, members present, statistics used: plain data."""

    @property
    def flags(self) -> list[str]:
        """Details that travel with each delivered experience."""
        return [flag for flag in FLAGS if self.details.get(flag)]


@dataclass(frozen=True, slots=True)
class DepartedRow:
    """What has left and isn't archived yet."""

    record: Record
    progress: ProgressRow | None
    """None: nothing had happened."""
    note: bytes
    """As it was given when it left."""
    uid_freed: bool
    """Its uid may be another experience's."""


def departed_name(seq: int) -> str:
    """Under which the payload of what has left is kept once its uid is free: no uid looks like it."""
    return f"departed {seq}"


class Departed(NamedTuple):
    """The same with all that is kept of it."""

    row: DepartedRow
    payload: Found[bytes]
    advantages: Found[AdvantageRow]


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


def share_with_group(record: Record, row: GroupRow) -> None:
    """Put the numbers of its group in place of a record's own, where they are equal."""
    record.group_id = row.id
    if record.push_time == row.open_time:
        record.push_time = row.open_time
