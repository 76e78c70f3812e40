"""What the server knows of one experience, in the form in which a million of them stay in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from experience_buffer_server.store.base import Record

if TYPE_CHECKING:
    from experience_buffer_server.groups import Group

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


class Entry:
    """One stored experience or tombstone in memory.

    `pending -> durable -> (computing ->) available -> leaving`; a tombstone is never available.
    """

    __slots__ = ("_state", "available", "group", "leaving", "magnitude", "record")

    record: Record
    group: Group | None
    available: bool
    """Consumers may sample it."""
    leaving: bool
    """Its removal is on its way to the disk, or has got there."""
    magnitude: float
    """Mean of |advantage| over its response tokens; 0 until it is computed."""

    def __init__(self, record: Record, group: Group | None, *, durable: bool = False) -> None:
        self.record = record
        self.group = group
        self.available = self.leaving = False
        self.magnitude = 0.0
        self._state = _STORED if durable else _NEW

    @property
    def durable(self) -> bool:
        """Its commit is on disk."""
        return self._state.durable

    @durable.setter
    def durable(self, durable: bool) -> None:
        self._state = _changed(self._state, "durable", durable)

    @property
    def acked(self) -> frozenset[str]:
        """Consumers that have consumed it."""
        return self._state.acked

    @acked.setter
    def acked(self, consumers: frozenset[str]) -> None:
        self._state = _changed(self._state, "acked", consumers)

    @property
    def computing(self) -> bool:
        """Its advantages are being computed or stored."""
        return self._state.computing

    @computing.setter
    def computing(self, computing: bool) -> None:
        self._state = _changed(self._state, "computing", computing)

    @property
    def counted(self) -> bool:
        """The running moments have counted its reward."""
        return self._state.counted

    @counted.setter
    def counted(self, counted: bool) -> None:
        self._state = _changed(self._state, "counted", counted)

    @property
    def changing(self) -> bool:
        """An annotation of it, or of a member of its group, is on its way to the disk."""
        return self._state.changing

    @changing.setter
    def changing(self, changing: bool) -> None:
        self._state = _changed(self._state, "changing", changing)

    @property
    def generation(self) -> int:
        """Counts its annotations: what was computed before one is void."""
        return self._state.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._state = _changed(self._state, "generation", generation)

    @property
    def missing(self) -> tuple[str, ...]:
        """Fields that the estimator needs and that are to come with an annotation."""
        return self._state.missing

    @missing.setter
    def missing(self, fields: tuple[str, ...]) -> None:
        self._state = _changed(self._state, "missing", fields)

    @property
    def quarantine(self) -> str:
        """Why it can't be delivered."""
        return self._state.quarantine

    @quarantine.setter
    def quarantine(self, reason: str) -> None:
        self._state = _changed(self._state, "quarantine", reason)

    @property
    def damage(self) -> str:
        """Why it was set aside: a row of it can't be read back; empty where it wasn't."""
        return "" if self.record.tombstone else self.record.note

    @property
    def is_staying(self) -> bool:
        """Neither on its way out nor a member of a dropped group."""
        return not self.leaving and (self.group is None or self.group.row.closed != "dropped")
