"""The counts that a consumer's limiter goes by, derived from its units' state: they can't drift.

Each unit in the buffer counts its own samples. What has left is summed up; a unit that left before it
was fully sampled gives its unused samples back (`limiter.refund`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from experience_buffer_server.sampling.limiter import Counts, LimiterPlan, refund


class _Present(NamedTuple):
    times: int
    num_bytes: int


class Tally:
    """Units and samples of one consumer. Not thread-safe."""

    def __init__(self, *, departed_inserts: int = 0, departed_samples: int = 0) -> None:
        self.departed_inserts = departed_inserts
        """Units that have left and still count, less those that are present and don't."""
        self.departed_samples = departed_samples
        """Their deliveries."""
        self._units: dict[int, _Present] = {}
        self._leaving: dict[int, tuple[_Present, int, int]] = {}
        self._passed: dict[int, tuple[_Present | None, int, int]] = {}
        """Units that are present and won't be sampled, with what of them counts as departed."""
        self._taken_off: set[int] = set()
        """Units that are present and don't count, until they are rewound; see `rebase`."""
        self._samples = 0
        self._ahead_bytes = 0

    def __contains__(self, key: int) -> bool:
        return key in self._units

    def arrived(self, key: int, *, num_bytes: int, times: int = 0) -> None:
        """A unit can be sampled; one that is known already may have other members now."""
        self.comes_back(key)
        unit = self._take(key)
        self._put(key, _Present(times if unit is None else unit.times, num_bytes))

    def sampled(self, key: int, count: int = 1) -> None:
        """A unit was delivered; with a negative count, that delivery ended without an ack."""
        unit = self._units.get(key)
        if unit is not None:
            self._change(key, unit, unit.times + count)

    def passed_over(self, key: int, plan: LimiterPlan) -> None:
        """A unit won't be sampled, though it may stay for others: refunded as if it had left."""
        if key not in self._taken_off and key not in self._passed:
            unit = self._units.get(key)
            before = self.departed_inserts, self.departed_samples
            self.give_up(key, plan)
            inserts, samples = self.departed_inserts - before[0], self.departed_samples - before[1]
            self._passed[key] = unit, inserts, samples

    def passed_before(self, key: int, plan: LimiterPlan, *, times: int) -> None:
        """A unit was passed over before the restart, when it had been sampled so often."""
        unit = _Present(times, 0)
        self._passed.setdefault(key, (unit, *refund(plan, times_sampled=times)))

    def comes_back(self, key: int) -> None:
        """A unit may be sampled again; if it was passed over, it counts as before that."""
        unit, inserts, samples = self._passed.pop(key, (None, 0, 0))
        self.departed_inserts -= inserts
        self.departed_samples -= samples
        if unit is not None:
            self._put(key, unit)

    def rewound(self, key: int, count: int) -> bool:
        """So many samples of a unit never were; returns whether it didn't count before, as it does now."""
        was_taken_off = key in self._taken_off
        if was_taken_off and (unit := self._units.get(key)) is not None:
            self.departed_inserts += 1
            self.departed_samples += unit.times
        self._taken_off.discard(key)
        self.comes_back(key)
        self.sampled(key, -count)
        return was_taken_off

    def take_off(self, key: int) -> None:
        """A unit is present and doesn't count any more."""
        if (unit := self._units.get(key)) is not None:
            self.departed_inserts -= 1
            self.departed_samples -= unit.times
            self._taken_off.add(key)

    def was_taken_off(self, key: int) -> None:
        """A unit didn't count before the restart, by what has departed."""
        self._taken_off.add(key)

    def used_up(self, key: int) -> None:
        """A unit won't be sampled, as all that is left of it was: nothing waits for its sample."""
        unit = self._units.get(key)
        if unit is not None:
            self._change(key, unit, max(unit.times, 1))

    def forget(self, key: int) -> None:
        """A unit stays and can't be delivered any more: as if it had never come."""
        if key not in self._taken_off:
            self._take(key)

    def give_up(self, key: int, plan: LimiterPlan) -> None:
        """A unit stays for others only, and won't be sampled again: refunded as if it had left."""
        if key not in self._taken_off:
            self.leaving(key, plan, consumed=False)
            self._leaving.pop(key, None)

    def leaving(self, key: int, plan: LimiterPlan, *, consumed: bool) -> None:
        """A unit is on its way out: consumed, or evicted, dropped, expired and refunded."""
        unit = self._take(key)
        if unit is None:
            return
        inserts, samples = 1, unit.times
        if not consumed and key not in self._taken_off:
            inserts, samples = refund(plan, times_sampled=unit.times)
        self.departed_inserts += inserts
        self.departed_samples += samples
        self._leaving[key] = (unit, inserts, samples)

    def stays(self, key: int) -> None:
        """The removal failed: the unit is still here."""
        unit, inserts, samples = self._leaving.pop(key, (None, 0, 0))
        if unit is not None:
            self.departed_inserts -= inserts
            self.departed_samples -= samples
            self._put(key, unit)

    def left(self, key: int) -> None:
        """The removal is on disk."""
        self._leaving.pop(key, None)
        self._passed.pop(key, None)
        self._taken_off.discard(key)

    def rebase(self, finished: Collection[int]) -> None:
        """Count from here on: for another ratio, by which the past isn't to be judged.

        Args:
            finished: Units that are present and won't be sampled any more: they are the past, too.
        """
        self.departed_inserts = self.departed_samples = 0
        self._taken_off = set()
        for key in finished:
            # What they count now, when they have left, and again after a restart, is taken off here.
            self.take_off(key)
        self._passed = {key: (unit, 0, 0) for key, (unit, _, _) in self._passed.items()}
        self._leaving = {key: (unit, 0, 0) for key, (unit, _, _) in self._leaving.items()}

    def counts(self, *, num_present: int = 0, finished: Collection[int] = ()) -> Counts:
        """For the limiter.

        Args:
            num_present: Units in the buffer, also those that aren't to be sampled yet.
            finished: Units in the buffer that won't be sampled any more.
        """
        num_units = max(len(self._units), num_present - len(self._passed))
        inserts = num_units + self.departed_inserts
        return Counts(
            inserts=inserts,
            deletes=self.departed_inserts,
            samples=self._samples + self.departed_samples,
            ahead_bytes=self._ahead_bytes,
            used_up=self._num_used_up(finished),
        )

    def _num_used_up(self, finished: Collection[int]) -> int:
        """How many of the finished units count as stored: but for those passed over, or leaving."""
        num_leaving = sum(key in finished for key in self._leaving) if finished else 0
        return max(len(finished) - len(self._passed) - num_leaving, 0)

    def ahead_bytes_of(self, keys: Iterable[int]) -> int:
        """Bytes of those of the units that weren't sampled yet."""
        units = (self._units.get(key) for key in keys)
        return sum(unit.num_bytes for unit in units if unit is not None and not unit.times)

    def _change(self, key: int, unit: _Present, times: int) -> None:
        # In place: a key that goes and comes makes the table grow until it is laid out anew.
        self._units[key] = _Present(times, unit.num_bytes)
        self._samples += times - unit.times
        if (not times) != (not unit.times):
            self._ahead_bytes += unit.num_bytes if unit.times else -unit.num_bytes

    def _put(self, key: int, unit: _Present) -> None:
        self._units[key] = unit
        self._samples += unit.times
        self._ahead_bytes += 0 if unit.times else unit.num_bytes

    def _take(self, key: int) -> _Present | None:
        unit = self._units.pop(key, None)
        if unit is not None:
            self._samples -= unit.times
            self._ahead_bytes -= 0 if unit.times else unit.num_bytes
        return unit
