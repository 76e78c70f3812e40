"""What left a buffer lately and why: the last thousand of each reason, and counts for a day. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Final, NamedTuple

from experience_buffer.history import Acknowledgement, Departure, DepartureCount
from experience_buffer_server.buffer.telemetry.seen import Seen

MOST_KEPT: Final = 1000
"""Departures, of each reason."""
WINDOW_SECONDS: Final = 900.0
NUM_WINDOWS: Final = 96


class _Left(NamedTuple):
    """Those that left together, for one reason; values are made of them when somebody looks."""

    time: float
    reason: str
    message: str
    entries: Sequence[Seen]
    acks: Sequence[tuple[Acknowledgement, ...]]
    unused: Collection[int]
    is_archived: bool

    def departures(self, *, unused_only: bool) -> Iterator[Departure]:
        """The last one first."""
        for entry, acks in zip(reversed(self.entries), reversed(self.acks), strict=True):
            record, group = entry.record, entry.group
            if unused_only and record.seq not in self.unused:
                continue
            yield Departure(
                uid=record.uid,
                group="" if group is None else group.row.key,
                reason=self.reason,
                message=self.message,
                time=self.time,
                reward=record.reward,
                is_trained=record.seq not in self.unused,
                acked_by=acks,
                is_archived=self.is_archived,
            )


class _Kept:
    """The last ones that left for one reason. Not thread-safe."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: deque[_Left] = deque()
        """Oldest first."""
        self._size = 0

    def add(self, left: _Left) -> None:
        self._parts.append(left)
        self._size += len(left.entries)
        while self._size - len(self._parts[0].entries) >= MOST_KEPT:
            self._size -= len(self._parts.popleft().entries)

    def departures(self, *, unused_only: bool) -> Iterator[Departure]:
        """The newest first."""
        parts = (left.departures(unused_only=unused_only) for left in reversed(self._parts))
        return islice(chain.from_iterable(parts), MOST_KEPT)


class DepartureLog:
    """Departures from one buffer. Not thread-safe."""

    def __init__(self) -> None:
        self._left: dict[str, _Kept] = {}
        """By reason."""
        self._totals: Counter[str] = Counter()
        self._windows: deque[tuple[float, Counter[str]]] = deque(maxlen=NUM_WINDOWS)
        """With their beginnings, oldest first; none in which nothing left."""

    def left(
        self,
        entries: Sequence[Seen],
        acks: Sequence[tuple[Acknowledgement, ...]],
        *,
        reason: str,
        message: str,
        unused: Collection[int],
        is_archived: bool = False,
        now: float,
    ) -> None:
        """Experiences left.

        Args:
            entries: No failed rollouts.
            acks: Of each, its acknowledgements.
            reason: One of a fixed few.
            message: More about it.
            unused: Seqs of those that were never trained on.
            is_archived: The archive has them, or is about to.
            now: Seconds since the Unix epoch.
        """
        last, of_last = entries[-MOST_KEPT:], acks[-MOST_KEPT:]
        left = _Left(now, reason, message, last, of_last, unused, is_archived)
        self._left.setdefault(reason, _Kept()).add(left)
        self._totals[reason] += len(entries)
        begin = now - now % WINDOW_SECONDS
        if not self._windows or self._windows[-1][0] != begin:
            self._windows.append((begin, Counter()))
        self._windows[-1][1][reason] += len(entries)

    def departures(
        self, *, reason: str = "", unused_only: bool = False, limit: int
    ) -> Iterator[Departure]:
        """The newest first; see `list_departures`."""
        chosen = [kept for name, kept in self._left.items() if reason in ("", name)]
        merged = heapq.merge(
            *(kept.departures(unused_only=unused_only) for kept in chosen),
            key=attrgetter("time"),
            reverse=True,
        )
        return islice(merged, limit)

    def window_times(self, now: float) -> tuple[float, ...]:
        """Beginnings of the windows of `counts`: up to now, since the first in which anything left."""
        if not self._windows:
            return ()
        last = now - now % WINDOW_SECONDS
        earliest = max(self._windows[0][0], last - (NUM_WINDOWS - 1) * WINDOW_SECONDS)
        number = round((last - earliest) / WINDOW_SECONDS) + 1
        return tuple(earliest + i * WINDOW_SECONDS for i in range(number))

    def counts(self, times: Sequence[float]) -> tuple[DepartureCount, ...]:
        """By reason, most first; `times` are the beginnings of the windows."""
        windows = dict(self._windows)
        return tuple(
            DepartureCount(
                reason=reason,
                total=total,
                recent=tuple(windows[time][reason] if time in windows else 0 for time in times),
            )
            for reason, total in self._totals.most_common()
        )
