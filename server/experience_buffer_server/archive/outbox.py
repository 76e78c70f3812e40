"""What has left one buffer and isn't archived yet: known here by number and uid, kept by the store.

It is bounded: beyond that the oldest leave without being archived, and are counted. Belongs to one
buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from experience_buffer_server.runtime import clock
from experience_buffer_server.store.interface import (
    DepartedRow,
    Record,
    Store,
    StoreError,
    WriteBatch,
)

_log = logging.getLogger(__name__)
_MOST_REFUSED: Final = 256
"""Refused pushes that wait for the next file: junk may come in floods."""
_MOST_REFUSED_BYTES: Final = 8 << 20
_MOST_REFUSED_PAYLOAD_BYTES: Final = 1 << 20
_MOST_UID_CHARS: Final = 500
_MOST_WORDS: Final = 1024
MOST_PENDING: Final = 262_144
"""Experiences that may wait, whatever their size: each takes some memory."""
_MOST_REMOVED: Final = 4096
"""In one commit: others' wait for it."""


class Refused(NamedTuple):
    """What was refused when it was pushed."""

    uid: str
    """Empty where nobody could read it."""
    reason: str
    message: str
    time: float
    """Seconds since the Unix epoch."""
    payload: bytes
    """With which it was pushed; empty where it isn't known which that was, or it was too large."""
    place: int
    """Which experience of the payload it is, from 0."""


class _Pending(NamedTuple):
    uid: str
    num_bytes: int
    time: float


@dataclass(slots=True)
class Counts:
    """What became of what has left, since the start; experiences."""

    num_archived: int = 0
    num_lost: int = 0
    """Left without being archived: the archive didn't keep up, or can't write."""
    num_refused_lost: int = 0
    """Refused pushes that weren't kept: there were too many."""


@dataclass(slots=True)
class Files:
    """The files of a buffer's archive, as they were after the last write."""

    num_segments: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    oldest_time: float = 0.0
    """When what is in them began to leave, seconds since the Unix epoch; 0: nothing is."""
    trouble: str = ""
    """Why the last write failed; empty: it didn't."""


@dataclass(slots=True)
class Outbox:
    """The outbox of one buffer. Not thread-safe."""

    buffer_id: int
    store: Store
    max_pending_bytes: int = 1 << 30
    """Payload bytes that may wait."""
    on_lost: Callable[[int], None] = lambda count: None
    """Told how many leave without being archived."""
    num_bytes: int = 0
    """Payload bytes that wait."""
    counts: Counts = field(default_factory=Counts)
    files: Files = field(default_factory=Files)
    refused: list[Refused] = field(default_factory=list)
    """What was refused lately and isn't in a file yet: in memory alone."""
    _pending: dict[int, _Pending] = field(default_factory=dict)
    """By seq, in the order in which they left."""
    _by_uid: dict[str, int] = field(default_factory=dict)
    """The newest of each uid whose payload is still kept under it."""
    _leaving: set[int] = field(default_factory=set)
    """Those whose commit is under way."""
    _in_flight: set[int] = field(default_factory=set)
    """Those that are being written."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def oldest_time(self) -> float:
        """When the one that waits the longest has left, seconds since the Unix epoch; 0: none waits."""
        first = next(iter(self._pending.values()), None)
        return 0.0 if first is None else first.time

    # --- coming

    def depart(self, batch: WriteBatch, record: Record, note: bytes) -> None:
        """Note the departure of an experience in a batch; `left` or `stayed` follows."""
        batch.depart(self.buffer_id, record, note)
        self._leaving.add(record.seq)

    def stayed(self, record: Record) -> None:
        """The batch has failed."""
        self._leaving.discard(record.seq)

    def left(self, record: Record) -> None:
        """The batch is on disk; without effect for what wasn't to be archived."""
        if record.seq in self._leaving:
            self._leaving.remove(record.seq)
            self._add(record, clock.now())

    def restore(self, rows: Iterable[DepartedRow], now: float) -> None:
        """Take over what the store holds."""
        for row in rows:
            self._add(row.record, now, uid_freed=row.uid_freed)

    def _add(self, record: Record, now: float, *, uid_freed: bool = False) -> None:
        self._pending[record.seq] = _Pending(record.uid, record.payload_bytes, now)
        self.num_bytes += record.payload_bytes
        if not uid_freed:
            self._by_uid[record.uid] = record.seq

    def refuse(
        self, uid: str, reason: str, message: str, payload: bytes | memoryview, place: int
    ) -> None:
        """Keep what was refused, if there is room; else count it."""
        num_bytes = len(payload) if len(payload) <= _MOST_REFUSED_PAYLOAD_BYTES else 0
        held = sum(len(one.payload) for one in self.refused)
        if len(self.refused) >= _MOST_REFUSED or held + num_bytes > _MOST_REFUSED_BYTES:
            self.counts.num_refused_lost += 1
            return
        kept = bytes(payload) if num_bytes else b""
        uid, message = uid[:_MOST_UID_CHARS], message[:_MOST_WORDS]
        # Each has a time of its own: pages are ordered by it.
        last = self.refused[-1].time if self.refused else 0.0
        now = max(clock.now(), last + 1e-6)
        self.refused.append(Refused(uid, reason, message, now, kept, place))

    # --- uids that are used again

    def waits(self, uid: str) -> int | None:
        """The number of what waits under a uid; None: nothing does."""
        return self._by_uid.get(uid)

    def free(self, batch: WriteBatch, uids: Iterable[str]) -> None:
        """Uids are about to be used again by the appends that follow; `freed` says that they were."""
        if self._by_uid:
            for uid in uids:
                if (seq := self._by_uid.get(uid)) is not None:
                    batch.free_uid(self.buffer_id, seq, uid)

    def freed(self, uids: Iterable[str]) -> None:
        """The appends are on disk."""
        if self._by_uid:
            for uid in uids:
                self._by_uid.pop(uid, None)

    # --- going

    def take(self, most: int, most_bytes: int) -> list[int]:
        """Numbers of the oldest that wait, to be written; `written` or `not_written` follows."""
        taken: list[int] = []
        num_bytes = 0
        for seq, pending in self._pending.items():
            if len(taken) >= most or (taken and num_bytes + pending.num_bytes > most_bytes):
                break
            if seq not in self._in_flight:
                taken.append(seq)
                num_bytes += pending.num_bytes
        self._in_flight.update(taken)
        return taken

    def not_written(self, seqs: Iterable[int]) -> None:
        """They couldn't be written, and are taken again."""
        self._in_flight.difference_update(seqs)

    async def written(self, seqs: Sequence[int]) -> None:
        """They are in a file: remove them from the store. Where that fails, they are written again.

        Nothing is twice in the archive for that: whoever writes looks for them first.
        """
        try:
            if await self._remove(seqs):
                self.counts.num_archived += len(seqs)
        finally:
            self._in_flight.difference_update(seqs)

    async def shed(self, *, everything: bool = False) -> int:
        """Let the oldest leave without being archived, as far as too many wait; how many.

        Args:
            everything: All that isn't being written, since the store needs the room.
        """
        lost: list[int] = []
        num, num_bytes = len(self._pending), self.num_bytes
        for seq, pending in self._pending.items():
            if not everything and num <= MOST_PENDING and num_bytes <= self.max_pending_bytes:
                break
            if seq not in self._in_flight:
                lost.append(seq)
                num, num_bytes = num - 1, num_bytes - pending.num_bytes
        if not lost:
            return 0
        self._in_flight.update(lost)
        try:
            await self._remove(lost)
        finally:
            self._in_flight.difference_update(lost)
        self.lost(len(lost))
        return len(lost)

    async def discard(self, uids: Iterable[str]) -> int:
        """Remove what waits under these uids and isn't being written, for good; how many."""
        seqs = [seq for uid in uids if (seq := self._by_uid.get(uid)) is not None]
        going = [seq for seq in seqs if seq not in self._in_flight]
        return len(going) if await self._remove(going) else 0

    def lost(self, count: int) -> None:
        """Count what leaves without being archived."""
        self.counts.num_lost += count
        self.on_lost(count)

    async def _remove(self, seqs: Sequence[int]) -> bool:
        for start in range(0, len(seqs), _MOST_REMOVED):
            part = [seq for seq in seqs[start : start + _MOST_REMOVED] if seq in self._pending]
            batch = self.store.batch()
            for seq in part:
                batch.archived(self.buffer_id, seq, self._pending[seq].uid)
            try:
                await asyncio.shield(self.store.ride(batch))
            except StoreError as error:
                _log.warning(
                    "%d archived experiences of buffer %d can't be removed from the store yet: %s",
                    len(part), self.buffer_id, error,
                )  # fmt: skip
                return False
            for seq in part:
                self._forget(seq)
        return True

    def _forget(self, seq: int) -> None:
        pending = self._pending.pop(seq, None)
        if pending is not None:
            self.num_bytes -= pending.num_bytes
            if self._by_uid.get(pending.uid) == seq:
                del self._by_uid[pending.uid]

    def drop_all(self) -> list[tuple[int, str]]:
        """Number and uid of all that waits, which the buffer's deletion removes; nothing waits then."""
        everything = [(seq, pending.uid) for seq, pending in self._pending.items()]
        self._pending.clear()
        self._by_uid.clear()
        self._in_flight.clear()
        self.num_bytes = 0
        return everything
