"""What each training step of each consumer has consumed: the last thousand steps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from experience_buffer.history import StepInfo
from experience_buffer_server.buffer.telemetry.seen import Seen
from experience_buffer_server.buffer.telemetry.spread import Spread

MAX_STEPS: Final = 1000
"""Per consumer."""
_MOST_NOTED: Final = 2048
_MOST_KEYS: Final = 32
_NUM_FRESH: Final = 8
"""Steps, the newest ones, whose groups are told apart: acks of earlier ones are rare."""


class _Noted(NamedTuple):
    entries: Sequence[Seen]
    version: int | None
    """The policy version when they were delivered."""


class _Group:
    """The rewards that one step has of one group."""

    __slots__ = ("count", "least", "most")

    def __init__(self) -> None:
        self.count, self.least, self.most = 0, 0.0, 0.0


class _Step:
    """One training step of one consumer. Not thread-safe."""

    __slots__ = (
        *("_groups", "_noted", "_num_noted", "advantages", "first_time", "is_partial", "keys"),
        *("last_time", "max_staleness", "num_compared", "num_experiences", "num_groups"),
        *("num_leases", "num_zero_variance", "rewards", "staleness", "tokens"),
    )

    def __init__(self) -> None:
        self.num_experiences = self.num_groups = self.num_leases = self.tokens = 0
        self.num_compared = self.num_zero_variance = 0
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.staleness = (0, 0)
        """Sum and number of those that are known."""
        self.max_staleness: int | None = None
        self.rewards, self.advantages = Spread(), Spread()
        self.keys: list[str] = []
        self.is_partial = False
        self._noted: list[_Noted] = []
        self._num_noted = 0
        self._groups: dict[int, _Group] = {}

    def acked(self, entries: Sequence[Seen], version: int | None) -> None:
        self._noted.append(_Noted(entries, version))
        self._num_noted += len(entries)
        if self._num_noted >= _MOST_NOTED:
            self.count()

    def count(self) -> None:
        """Count what was noted."""
        if not self._noted:
            return
        noted, self._noted, self._num_noted = self._noted, [], 0
        rewards: list[float] = []
        advantages: list[float] = []
        for entries, version in noted:
            self._count(entries, version)
            rewards += [r for entry in entries if (r := entry.record.reward) is not None]
            advantages += [a for entry in entries if (a := entry.advantage) is not None]
        self.rewards.add(np.array(rewards, np.float64))
        self.advantages.add(np.array(advantages, np.float64))

    def _count(self, entries: Sequence[Seen], version: int | None) -> None:
        records = [entry.record for entry in entries]
        self.num_experiences += len(records)
        self.tokens += sum([record.response_tokens for record in records])
        if version is not None:
            behind = [version - low for r in records if (low := r.min_version) is not None]
            total, number = self.staleness
            self.staleness = total + sum(behind), number + len(behind)
            if behind:
                before = self.max_staleness
                self.max_staleness = max(behind) if before is None else max(before, *behind)
        for group_id, members in groupby(entries, attrgetter("record.group_id")):
            if group_id:
                self._count_group(group_id, list(members))

    def _count_group(self, group_id: int, members: list[Seen]) -> None:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
            if len(self.keys) < _MOST_KEYS and (seen := members[0].group) is not None:
                self.keys.append(seen.row.key)
        rewards = [r for member in members if (r := member.record.reward) is not None]
        if rewards:
            least, most = min(rewards), max(rewards)
            group.least = min(group.least, least) if group.count else least
            group.most = max(group.most, most) if group.count else most
            group.count += len(rewards)

    def close(self) -> None:
        """Its groups aren't told apart any more."""
        self.count()
        self.num_groups, self.num_compared, self.num_zero_variance = self.group_counts()
        self._groups.clear()

    def group_counts(self) -> tuple[int, int, int]:
        """Groups, those with at least two rewards, and those of them whose rewards are all equal."""
        compared = [group for group in self._groups.values() if group.count > 1]
        return (
            self.num_groups + len(self._groups),
            self.num_compared + len(compared),
            self.num_zero_variance + sum(group.least == group.most for group in compared),
        )


class StepLog:
    """The training steps of one buffer's consumers. Not thread-safe."""

    def __init__(self) -> None:
        self._consumers: dict[str, dict[int, _Step]] = {}

    def acked(
        self, consumer: str, step: int, entries: Sequence[Seen], version: int | None, now: float
    ) -> None:
        """A lease was acknowledged; `version` is the policy version when it was granted."""
        found = self._step(consumer, step)
        found.num_leases += 1
        found.first_time = now if found.first_time is None else found.first_time
        found.last_time = now
        found.acked(entries, version)

    def restore(
        self, consumer: str, step: int, entries: Sequence[Seen], times: Collection[float]
    ) -> None:
        """Experiences are kept for a rewind, which a step acknowledged before the start, at these times."""
        found = self._step(consumer, step)
        found.is_partial = True
        found.first_time, found.last_time = min(times, default=None), max(times, default=None)
        found.acked(entries, None)

    def rewound(self, consumer: str, step: int) -> None:
        """Forget the steps after one: they never happened."""
        steps = self._consumers.get(consumer, {})
        for later in [each for each in steps if each > step]:
            del steps[later]

    def forget(self, consumer: str) -> None:
        """A consumer was removed."""
        self._consumers.pop(consumer, None)

    def count(self) -> None:
        """Count what was noted of the newest steps."""
        for steps in self._consumers.values():
            for step in _newest(steps):
                step.count()

    def infos(
        self, consumer: str, retained: Iterable[int], *, step: int | None, limit: int
    ) -> Iterator[StepInfo]:
        """The steps of a consumer, the highest first, each as it is when its turn comes.

        Args:
            consumer: Its name.
            retained: Steps that a rewind can undo.
            step: Only this one; None: all.
            limit: Most of them.
        """
        steps = self._consumers.get(consumer, {})
        chosen = sorted(steps, reverse=True)[:limit] if step is None else [step]
        kept = set(retained)
        for number in chosen:
            # Others may have their turn in between, and a rewind may come.
            if (found := steps.get(number)) is not None:
                found.count()
                yield _info(consumer, number, found, is_retained=number in kept)

    def _step(self, consumer: str, step: int) -> _Step:
        steps = self._consumers.setdefault(consumer, {})
        found = steps.get(step)
        if found is None:
            found = steps[step] = _Step()
            if len(steps) > _NUM_FRESH:
                # In the order in which they came.
                list(steps.values())[-_NUM_FRESH - 1].close()
            if len(steps) > MAX_STEPS:
                del steps[next(iter(steps))]
        return found


def _newest(steps: dict[int, _Step]) -> Iterator[_Step]:
    for number, step in enumerate(reversed(steps.values())):
        if number > _NUM_FRESH:
            return
        yield step


def _info(consumer: str, number: int, step: _Step, *, is_retained: bool) -> StepInfo:
    total, count = step.staleness
    num_groups, num_compared, num_zero_variance = step.group_counts()
    return StepInfo(
        consumer=consumer,
        step=number,
        num_experiences=step.num_experiences,
        num_groups=num_groups,
        num_leases=step.num_leases,
        response_tokens=step.tokens,
        first_ack_time=step.first_time,
        last_ack_time=step.last_time,
        mean_staleness=total / count if count else None,
        max_staleness=step.max_staleness,
        rewards=step.rewards.distribution(),
        advantages=step.advantages.distribution(),
        num_compared_groups=num_compared,
        num_zero_variance_groups=num_zero_variance,
        groups=tuple(step.keys),
        is_retained=is_retained,
        is_partial=step.is_partial,
    )
