"""One experience, from the candidate that was read to the entry that is stored; and its group.

Of entries a million stay in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from experience_buffer.eid import EID
from experience_buffer_server.sampling.staleness import Age
from experience_buffer_server.settings.consumer import ConsumerSettings, SelectorSettings
from experience_buffer_server.store.interface import (
    MAX_KEY_BYTES,
    MAX_PRIORITY,
    GroupRow,
    Payload,
    Record,
)

_T = TypeVar("_T")


class Reason(StrEnum):
    """Why an item is refused; the wire has the same names."""

    INVALID = "invalid"
    CONFLICT = "conflict"
    LATE = "late"
    MISSING_FIELD = "missing_field"
    GROUP_SIZE = "group_size"
    FUTURE_VERSION = "future_version"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One item isn't stored; its neighbours are not affected."""

    reason: Reason
    message: str
    uid: str = ""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """An experience or tombstone that may be stored; nobody changes it."""

    eid: EID
    uid: str
    payload: Payload
    """The canonical TRXP payload of this experience alone; empty for a tombstone."""
    digest: bytes
    reward: float | None
    response_tokens: int
    min_version: int | None
    max_version: int | None
    fields: int = 0
    """Which of an estimator's inputs it carries; see `experience_inputs.input_fields`."""
    priority: float = 1.0
    tombstone: bool = False
    note: str = ""
    trains_all: bool = False
    """Every token but the first is the response, and none of them is masked."""


MAX_NOTE = 1024
"""Characters of a reason that a client gives; longer ones are cut."""

ORDINARY = 1 << 61
"""Bit of `Record.fields`: all tokens after the prompt are the response, and nothing was cut off."""
CUT_OFF = 1 << 59
"""Bit of `Record.fields`: its response was cut off. Rows from before there was the bit haven't got it."""
COUNTED = 1 << 62
"""Bit of `Record.fields`: the running moments have counted its reward before it was annotated."""


def check_uid(uid: str) -> str:
    """What keeps a uid from being a key of the store; empty when nothing does."""
    if uid.isascii() and len(uid) <= MAX_KEY_BYTES:
        return ""
    try:
        size = len(uid.encode())
    except UnicodeEncodeError as error:
        return f"uid {uid!a}: not valid Unicode at character {error.start}; send plain text"
    if size > MAX_KEY_BYTES:
        return (
            f"uid of {size} bytes is over the limit of {MAX_KEY_BYTES} bytes for a key of the "
            f"store; shorten batch, task or suffix ({uid[:60]!r}...)"
        )
    return ""


_MAX_TRANSITIONS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """What changes seldom, or is the same for very many: entries of the same state share one."""

    durable: bool = False
    acked: frozenset[str] = frozenset()
    computing: bool = False
    counted: bool = False
    changing: bool = False
    generation: int = 0
    missing: tuple[str, ...] = ()
    quarantine: str = ""


@lru_cache(_MAX_TRANSITIONS)
def _changed(state: _State, name: str, value: Any) -> _State:
    """A state with another value: the same one for all that come to it in the same way."""
    return state if getattr(state, name) == value else replace(state, **{name: value})


_NEW = _State()
_STORED = _changed(_NEW, "durable", True)


class _Shared(property, Generic[_T]):
    """A value of an entry that is in its shared state. Read without a call of Python."""

    def __init__(self, name: str) -> None:
        def change(entry: Entry, value: _T) -> None:
            entry._state = _changed(entry._state, name, value)

        super().__init__(attrgetter(f"_state.{name}"), change)

    if TYPE_CHECKING:

        def __get__(self, entry: Any, kind: type | None = None, /) -> _T: ...  # type: ignore[override]

        def __set__(self, entry: Any, value: _T, /) -> None: ...


class Entry:
    """One stored experience or tombstone in memory.

    `pending -> durable -> (computing ->) available -> leaving`; a tombstone is never available.
    """

    __slots__ = ("_state", "advantage", "available", "group", "leaving", "magnitude", "record")

    record: Record
    group: Group | None
    available: bool
    """Consumers may sample it."""
    leaving: bool
    """Its removal is on its way to the disk, or has got there."""
    magnitude: float
    """Mean of |advantage| over its response tokens; 0 until it is computed."""
    advantage: float | None
    """Mean of its advantages over the tokens that train; None until it is computed, and after a restart."""
    durable = _Shared[bool]("durable")
    """Its commit is on disk."""
    acked = _Shared[frozenset[str]]("acked")
    """Consumers that have consumed it."""
    computing = _Shared[bool]("computing")
    """Its advantages are being computed or stored."""
    counted = _Shared[bool]("counted")
    """The running moments have counted its reward."""
    changing = _Shared[bool]("changing")
    """An annotation of it, or of a member of its group, is on its way to the disk."""
    generation = _Shared[int]("generation")
    """Counts its annotations: what was computed before one is void."""
    missing = _Shared[tuple[str, ...]]("missing")
    """Fields that the estimator needs and that are to come with an annotation."""
    quarantine = _Shared[str]("quarantine")
    """Why it can't be delivered."""

    def __init__(self, record: Record, group: Group | None, *, durable: bool = False) -> None:
        self.record = record
        self.group = group
        self.available = self.leaving = False
        self.magnitude = 0.0
        self.advantage = None
        self._state = _STORED if durable else _NEW

    @property
    def damage(self) -> str:
        """Why it was set aside: a row of it can't be read back; empty where it wasn't."""
        return "" if self.record.tombstone else self.record.note

    @property
    def truncated(self) -> bool | None:
        """Whether its response was cut off; None: unknown."""
        fields = self.record.fields
        return True if fields & CUT_OFF else False if fields & ORDINARY else None

    @property
    def is_staying(self) -> bool:
        """Neither on its way out nor a member of a dropped group."""
        return not self.leaving and (self.group is None or self.group.row.closed != "dropped")


@dataclass(slots=True, eq=False)
class Group:
    """Experiences that share a key.

    `open -> closed` (takes no more members) `-> whole` (all members durable) `-> available`.
    """

    row: GroupRow
    members: list[Entry] = field(default_factory=list)
    """In order of arrival, pending ones included."""
    num_durable: int = 0
    available: bool = False
    """Consumers may sample it as a whole."""
    deadline: float = math.inf
    """Seconds since the Unix epoch."""
    overdue: bool = False
    """Unfinished past its deadline."""
    completed: bool = False
    """It was told once that it is whole, and lacks no field."""

    @property
    def is_open(self) -> bool:
        """Takes more members."""
        return not self.row.closed

    @property
    def is_whole(self) -> bool:
        """Closed, not dropped, and every member is on disk."""
        closed = self.row.closed
        return closed not in ("", "dropped") and self.num_durable == len(self.members)

    @property
    def damage(self) -> str:
        """Why it isn't delivered as a group: rows of it can't be read back; empty where it is."""
        if self.row.quarantined:
            return self.row.note
        for entry in self.members:
            if entry.record.note and entry.damage and not entry.leaving:
                return f"its member {entry.record.uid!r} is set aside: {entry.damage}"
        return ""

    @property
    def num_members(self) -> int:
        """Members that have come, those consumed before it closed included."""
        staying = sum(not entry.leaving for entry in self.members)
        return staying + self.row.num_consumed

    @property
    def has_consumed(self) -> bool:
        """Members were consumed and removed after it closed: others that leave are taken off its size."""
        return not self.is_open and self.num_members < self.row.size

    @property
    def is_over(self) -> bool:
        """Holds nothing, and nothing is to be remembered but that it closed."""
        counts = self.is_open and self.row.size and self.row.num_consumed
        return not self.members and not counts

    @property
    def votes(self) -> list[Entry]:
        """Members that are experiences, not tombstones."""
        return [entry for entry in self.members if not entry.record.tombstone]

    @property
    def missing(self) -> tuple[str, ...]:
        """Fields that members lack, each once."""
        return tuple(dict.fromkeys(name for entry in self.votes for name in entry.missing))

    @property
    def is_unfinished(self) -> bool:
        """Waits for members, or for fields of members: its deadline counts."""
        return self.is_open or (self.row.closed != "dropped" and bool(self.missing))

    def describe(self) -> str:
        """`5 of 8`, or `5 of unknown`."""
        return f"{self.num_members} of {self.row.size or 'unknown'}"


def key_of(settings: ConsumerSettings, entry: Entry) -> int:
    """The number of the unit that an entry belongs to; 0: to none.

    A unit's number is the seq of its experience, or the id of its group.
    """
    if settings.unit == "item":
        return entry.record.seq
    return 0 if entry.group is None else entry.group.row.id


def age_of(entries: Sequence[Entry]) -> Age:
    """How old a unit is: by its oldest member, and by the versions of all."""
    records = [entry.record for entry in entries]
    lowest = [record.min_version for record in records if record.min_version is not None]
    highest = [record.max_version for record in records if record.max_version is not None]
    return Age(
        min_version=min(lowest, default=None),
        max_version=max(highest, default=None),
        push_time=min(record.push_time for record in records),
    )


def value_of(selector: SelectorSettings, entries: Sequence[Entry]) -> float:
    """What a selector chooses a unit by; of a group, the mean of its members. Always finite or -inf."""
    kind = selector.kind
    if kind in ("fifo", "lifo", "uniform"):
        return 0.0
    if kind in ("freshest", "staleness"):
        version = age_of(entries).min_version
        return -math.inf if version is None else float(version)
    if kind == "advantage":
        return math.fsum(entry.magnitude for entry in entries) / len(entries)
    if kind != "prioritized" and selector.key != "priority":
        return math.fsum(_key(selector.key, entry) for entry in entries) / len(entries)
    priorities = (min(entry.record.priority, MAX_PRIORITY) for entry in entries)
    return math.fsum(priorities) / len(entries)


def _key(name: str, entry: Entry) -> float:
    if name == "reward":
        return entry.record.reward or 0.0
    return float(entry.record.response_tokens)
