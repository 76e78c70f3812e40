"""What Prometheus reads of learning and of age: rewards, lengths, groups, and what has waited longest.

Read from the buffers when it scrapes, as in `gauges`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.oldest_ready import OldestReady
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.runtime import clock

_PREFIX: Final = "experience_buffer_"
_RECENT_SECONDS: Final = 60.0
_MAX_LOOKS: Final = 1000

Buckets = tuple[list[tuple[str, float]], float]
"""Limits and cumulative counts of a histogram, and the sum of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is read of one buffer."""

    name: str
    rewards: Buckets
    response_tokens: Buckets
    mean_reward: float | None
    std_reward: float | None
    num_rewarded: int
    num_solved: int
    groups: Mapping[str, int]
    num_zero_variance_groups: int
    oldest_open_group_seconds: float
    oldest_lease_seconds: Mapping[str, float]
    """By consumer, as the next one."""
    oldest_ready_seconds: Mapping[str, float]


class Watch:
    """Reads buffers for `families`. Belongs to their event loop."""

    def __init__(self) -> None:
        self._oldest: WeakKeyDictionary[Consumer, OldestReady] = WeakKeyDictionary()

    def look(self, buffer: Buffer) -> Watched:
        """One buffer as it is now."""
        state, now = buffer.state, clock.now()
        telemetry = state.telemetry
        recent = telemetry.trends.spreads(now - _RECENT_SECONDS).rewards.distribution()
        learning = telemetry.learning
        # By their opening, but for those that were opened again.
        open_groups = itertools.islice(state.contents.groups.open_groups, _MAX_LOOKS)
        opened = min((group.row.open_time for group in open_groups), default=now)
        return Watched(
            name=buffer.name,
            rewards=(learning.rewards.cumulative(), learning.rewards.total),
            response_tokens=(learning.response_tokens.cumulative(), learning.response_tokens.total),
            mean_reward=recent.mean,
            std_reward=recent.std,
            num_rewarded=learning.num_rewarded,
            num_solved=learning.num_solved,
            groups={str(solved): count for solved, count in learning.groups.items()},
            num_zero_variance_groups=learning.num_zero_variance_groups,
            oldest_open_group_seconds=max(now - opened, 0.0),
            oldest_lease_seconds={
                name: _oldest_lease(consumer, now) for name, consumer in state.consumers.items()
            },
            oldest_ready_seconds={
                name: self._ready(consumer).age_seconds(state, consumer, now)
                for name, consumer in state.consumers.items()
            },
        )

    def _ready(self, consumer: Consumer) -> OldestReady:
        return self._oldest.setdefault(consumer, OldestReady())


def _oldest_lease(consumer: Consumer, now: float) -> float:
    times = [time for lease in consumer.leases.values() if (time := lease.grant_time) is not None]
    return max(now - min(times, default=now), 0.0)


def families(watched: Sequence[Watched]) -> Iterator[Metric]:
    """One family per metric."""
    yield from _histograms(watched)
    yield from _counters(watched)
    for name, text, attribute in (
        ("reward_mean", "Mean of the rewards that came in the last minute or two.", "mean_reward"),
        ("reward_stddev", "Standard deviation of the same.", "std_reward"),
        (
            "oldest_open_group_age_seconds",
            "Since the first member of the oldest open group came; 0: none is open.",
            "oldest_open_group_seconds",
        ),
    ):
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["buffer"])
        for one in watched:
            if (number := getattr(one, attribute)) is not None:
                gauge.add_metric([one.name], number)
        yield gauge
    for name, text, attribute in (
        (
            "oldest_lease_age_seconds",
            "Since the oldest open lease was granted; 0: none is open.",
            "oldest_lease_seconds",
        ),
        (
            "oldest_ready_age_seconds",
            "Since the oldest unit was pushed that can be sampled now; 0: there is none.",
            "oldest_ready_seconds",
        ),
    ):
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["buffer", "consumer"])
        for one in watched:
            for consumer, number in getattr(one, attribute).items():
                gauge.add_metric([one.name, consumer], number)
        yield gauge


def _histograms(watched: Sequence[Watched]) -> Iterator[Metric]:
    for name, text, attribute in (
        ("reward", "Rewards of experiences, pushed or annotated.", "rewards"),
        ("response_tokens", "Response lengths of pushed experiences.", "response_tokens"),
    ):
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["buffer"])
        for one in watched:
            buckets, total = getattr(one, attribute)
            family.add_metric([one.name], buckets, total)
        yield family


def _counters(watched: Sequence[Watched]) -> Iterator[Metric]:
    for name, text, attribute in (
        (
            "rewarded_experiences",
            "Experiences that have got a reward, pushed or annotated.",
            "num_rewarded",
        ),
        ("solved_experiences", "Of these, those whose reward is above 0.", "num_solved"),
        (
            "zero_variance_groups",
            "Groups that became whole with at least two rewards, all of them equal.",
            "num_zero_variance_groups",
        ),
    ):
        counter = CounterMetricFamily(_PREFIX + name, text, labels=["buffer"])
        for one in watched:
            counter.add_metric([one.name], getattr(one, attribute))
        yield counter
    groups = CounterMetricFamily(
        _PREFIX + "whole_groups",
        "Groups that became whole with at least two rewards, by how many of these are above 0.",
        labels=["buffer", "solved"],
    )
    for one in watched:
        for solved, number in one.groups.items():
            groups.add_metric([one.name, solved], number)
    yield groups
