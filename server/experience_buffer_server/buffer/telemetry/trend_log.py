"""The last fifteen minutes of a buffer: a point every few seconds, and how values were spread meanwhile.

What happens is only noted where it happens: in lists, which are counted together here, at times. Pure.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experience_buffer.history import ConsumerTrend, TrendPoint
from experience_buffer_server.buffer.telemetry.learning import Learning
from experience_buffer_server.buffer.telemetry.seen import Depth, Seen
from experience_buffer_server.buffer.telemetry.spread import WHOLE, Spread
from experience_buffer_server.store.record import Record

INTERVAL_SECONDS: Final = 5.0
KEPT_SECONDS: Final = 900.0
_MINUTE_SECONDS: Final = 60.0
_MOST_NOTED: Final = 2048
"""Values that are noted and not counted yet: a list of them takes well under a millisecond."""


class Spreads:
    """How what came within some time is spread."""

    __slots__ = ("advantages", "response_tokens", "rewards", "seconds_in_buffer", "staleness")

    def __init__(self) -> None:
        self.rewards = Spread()
        self.advantages = Spread()
        self.response_tokens = Spread(WHOLE)
        self.staleness = Spread(WHOLE)
        self.seconds_in_buffer = Spread()

    @property
    def is_empty(self) -> bool:
        """Nothing has come yet."""
        return not any(getattr(self, name).count for name in self.__slots__)

    def merge(self, other: Spreads) -> None:
        """Count what another one has counted, too."""
        for name in self.__slots__:
            getattr(self, name).merge(getattr(other, name))


class _Means:
    """Sums of what came in one interval."""

    __slots__ = ("count", "most", "total")

    def __init__(self) -> None:
        self.count, self.total, self.most = 0, 0.0, 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        if len(values):
            most = float(values.max())
            self.most = max(self.most, most) if self.count else most
            self.count += len(values)
            self.total += float(values.sum())

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


class _Interval:
    """What happened since the last point."""

    __slots__ = (
        *("acked", "ages", "delivered", "is_idle", "lengths", "num_groups", "num_pushed"),
        *("num_pushed_bytes", "num_solved", "num_trained", "num_unused", "num_zero_variance"),
        *("rewards", "staleness"),
    )

    def __init__(self) -> None:
        self.is_idle = True
        self.num_pushed = self.num_pushed_bytes = self.num_trained = self.num_unused = 0
        self.num_groups = self.num_zero_variance = self.num_solved = 0
        self.delivered: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        self.rewards, self.lengths, self.ages, self.staleness = (_Means() for _ in range(4))


class TrendLog:
    """The trends of one buffer. Not thread-safe.

    Args:
        now: Seconds since the Unix epoch.
        learning: Gets the same values, for good.
        offset: Seconds until its first point: those of many buffers aren't made at once.
    """

    def __init__(self, now: float, learning: Learning, offset: float = INTERVAL_SECONDS) -> None:
        self._learning = learning
        self._last_time, self._next_time = now, now + offset
        self._current = _Interval()
        self._idle: Depth | None = None
        """What the buffer held at the last point, if nothing had happened before that."""
        self._points: deque[tuple[TrendPoint, deque[float]]] = deque()
        """Oldest first; one in which nothing changed is that before it, at other times, too."""
        self._minutes: deque[tuple[float, Spreads]] = deque([(now, Spreads())])
        """With their beginnings, oldest first; the last one isn't over."""
        self._pushed: list[Record] = []
        self._rewards: list[float] = []
        """Those that came later than their experiences."""
        self._ages: list[float] = []
        self._staleness: list[int] = []
        self._advantages: list[float] = []

    # --- what happens

    def pushed(self, entries: Sequence[Seen]) -> None:
        """Experiences, or failed rollouts, were stored."""
        # As they are now: an annotation may replace what is known of them.
        self._pushed += [entry.record for entry in entries]
        if len(self._pushed) >= _MOST_NOTED:
            self.count()

    def rewarded(self, rewards: Sequence[float]) -> None:
        """Rewards came for experiences that were pushed without one."""
        self._rewards += rewards
        if len(self._rewards) >= _MOST_NOTED:
            self.count()

    def delivered(
        self, consumer: str, ages: Sequence[float], staleness: Sequence[int], *, is_raw: bool
    ) -> None:
        """Experiences were delivered: their seconds in the buffer, and versions behind where known."""
        current = self._current
        current.is_idle = False
        current.delivered[consumer] = current.delivered.get(consumer, 0) + len(ages)
        if is_raw:
            return
        self._ages += ages
        self._staleness += staleness
        if len(self._ages) >= _MOST_NOTED:
            self.count()

    def computed(self, advantages: Sequence[float]) -> None:
        """Experiences were computed: a mean advantage of each."""
        self._advantages += advantages
        if len(self._advantages) >= _MOST_NOTED:
            self.count()

    def acked(self, consumer: str, num_experiences: int, *, is_raw: bool) -> None:
        """Experiences were acknowledged."""
        current = self._current
        current.is_idle = False
        current.acked[consumer] = current.acked.get(consumer, 0) + num_experiences
        if not is_raw:
            current.num_trained += num_experiences

    def left(self, num_unused: int) -> None:
        """Experiences left without having been trained on."""
        self._current.is_idle = False
        self._current.num_unused += num_unused

    def completed(self, *, is_zero_variance: bool) -> None:
        """A group with at least two rewards became whole."""
        self._current.is_idle = False
        self._current.num_groups += 1
        self._current.num_zero_variance += is_zero_variance

    def count(self) -> None:
        """Count what was noted."""
        noted = (self._pushed, self._rewards, self._ages, self._staleness, self._advantages)
        if not any(noted):
            return
        current, spreads = self._current, self._minutes[-1][1]
        current.is_idle = False
        if self._pushed:
            self._count_pushed(current, spreads)
        if self._rewards:
            self._count_rewards(np.array(self._rewards), current, spreads)
        if self._ages:
            ages = np.array(self._ages)
            current.ages.add(ages)
            spreads.seconds_in_buffer.add(ages)
        if self._staleness:
            staleness = np.array(self._staleness, np.float64)
            current.staleness.add(staleness)
            spreads.staleness.add(staleness)
        if self._advantages:
            spreads.advantages.add(np.array(self._advantages))
        self._rewards, self._ages, self._staleness, self._advantages = [], [], [], []

    def _count_pushed(self, current: _Interval, spreads: Spreads) -> None:
        records, self._pushed = self._pushed, []
        experiences = [record for record in records if not record.tombstone]
        rewards = np.array([r.reward for r in experiences if r.reward is not None], np.float64)
        lengths = np.array([record.response_tokens for record in experiences], np.float64)
        current.num_pushed += len(experiences)
        current.num_pushed_bytes += sum([record.payload_bytes for record in experiences])
        current.lengths.add(lengths)
        spreads.response_tokens.add(lengths)
        self._learning.pushed(lengths)
        self._count_rewards(rewards, current, spreads)

    def _count_rewards(
        self, rewards: NDArray[np.float64], current: _Interval, spreads: Spreads
    ) -> None:
        current.rewards.add(rewards)
        current.num_solved += int(np.count_nonzero(rewards > 0))
        spreads.rewards.add(rewards)
        self._learning.rewarded(rewards)

    # --- time

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next point."""
        return now >= self._next_time

    def sample(self, now: float, depth: Depth) -> None:
        """Make the point of what happened since the last one."""
        self.count()
        idle = depth if self._current.is_idle else None
        if idle is not None and idle == self._idle:
            self._points[-1][1].append(now)
        else:
            current, self._current = self._current, _Interval()
            self._points.append((self._point(now, current, depth), deque([now])))
        self._idle = idle
        self._last_time, self._next_time = now, now + INTERVAL_SECONDS
        begin, spreads = self._minutes[-1]
        if now >= begin + _MINUTE_SECONDS:
            if spreads.is_empty:
                self._minutes.pop()
            self._minutes.append((now, spreads if spreads.is_empty else Spreads()))
        self._forget(now - KEPT_SECONDS)

    def _forget(self, before: float) -> None:
        while self._points and self._points[0][1][0] < before:
            times = self._points[0][1]
            times.popleft()
            if not times:
                self._points.popleft()
        while len(self._minutes) > 1 and self._minutes[1][0] <= before:
            self._minutes.popleft()

    def _point(self, now: float, current: _Interval, depth: Depth) -> TrendPoint:
        trained = [consumer for consumer in depth.consumers if not consumer.is_raw]
        raw = {consumer.name for consumer in depth.consumers if consumer.is_raw}
        rewards, staleness = current.rewards, current.staleness
        return TrendPoint(
            time=now,
            seconds=now - self._last_time,
            num_pushed=current.num_pushed,
            num_pushed_bytes=current.num_pushed_bytes,
            num_trained=current.num_trained,
            num_delivered=sum(
                count for name, count in current.delivered.items() if name not in raw
            ),
            num_unused=current.num_unused,
            num_items=depth.num_items,
            num_bytes=depth.num_bytes,
            num_open_groups=depth.num_open_groups,
            num_ready_units=min((consumer.num_ready_units for consumer in trained), default=0),
            mean_reward=rewards.mean,
            solve_ratio=current.num_solved / rewards.count if rewards.count else None,
            mean_response_tokens=current.lengths.mean,
            mean_staleness=staleness.mean,
            max_staleness=int(staleness.most) if staleness.count else None,
            mean_seconds_in_buffer=current.ages.mean,
            num_groups=current.num_groups,
            num_zero_variance_groups=current.num_zero_variance,
            consumers=tuple(
                ConsumerTrend(
                    name=consumer.name,
                    num_ready_units=consumer.num_ready_units,
                    num_leased_units=consumer.num_leased_units,
                    num_waiting=consumer.num_waiting,
                    num_delivered=current.delivered.get(consumer.name, 0),
                    num_acked=current.acked.get(consumer.name, 0),
                )
                for consumer in depth.consumers
            ),
        )

    # --- looking

    def points(self, since: float) -> Iterator[TrendPoint]:
        """Those that ended after a time, oldest first."""
        for point, times in self._points:
            for time in times:
                if time > since:
                    # Where it stands for several, they were as long as one is by its clock.
                    yield (
                        point
                        if time == point.time
                        else dataclasses.replace(point, time=time, seconds=INTERVAL_SECONDS)
                    )

    def spreads(self, since: float) -> Spreads:
        """How values are spread, of the minutes that end after a time."""
        self.count()
        merged = Spreads()
        for spreads in _since(self._minutes, since):
            merged.merge(spreads)
        return merged


def _since(minutes: Iterable[tuple[float, Spreads]], since: float) -> list[Spreads]:
    """Those that end after a time: each ends where the next one begins."""
    listed = list(minutes)
    first = sum(begin <= since for begin, _ in listed[1:])
    return [spreads for _, spreads in listed[first:]]
