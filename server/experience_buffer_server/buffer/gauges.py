"""What is read from the buffers when Prometheus scrapes, so that it can't drift: all gauges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experience_buffer_server.buffer.learning_gauges import Watched, families
from experience_buffer_server.buffer.stats import BufferStats

_PREFIX = "experience_buffer_"
_TIMEOUT_SECONDS = 5.0

_BUFFER_GAUGES = (
    ("items", "Experiences stored.", "num_items"),
    ("payload_bytes", "Payload bytes stored.", "num_bytes"),
    ("open_groups", "Groups that aren't whole.", "num_open_groups"),
    ("overdue_groups", "Open groups past their deadline.", "num_overdue_groups"),
    ("computing_groups", "Groups being computed.", "num_computing_groups"),
    ("quarantined_groups", "Groups that can't be computed.", "num_quarantined_groups"),
    (
        "experiences_waiting_for_fields",
        "Experiences that lack a field the estimator needs.",
        "num_waiting_for_fields",
    ),
    ("waiting_pushes", "Pushes that wait for room.", "num_waiting_pushes"),
    (
        "damaged_experiences",
        "Experiences set aside because a row can't be read back.",
        "num_damaged",
    ),
    ("reserved_groups", "Places taken by workers.", "num_reserved_groups"),
    ("policy_version", "Newest published policy version.", "policy_version"),
    (
        "used_ratio",
        "Used of max_items or max_bytes, of the one that is tighter; 0 to 1.",
        "used_ratio",
    ),
)
_BUFFER_COUNTERS = (
    ("used_experiences", "Experiences acknowledged for the first time.", "num_used"),
    (
        "unused_experiences",
        "Experiences that left without ever having been acknowledged.",
        "num_unused",
    ),
)
_ARCHIVE_GAUGES = (
    ("archive_pending_experiences", "Left, and not in a file yet.", "num_pending"),
    (
        "archive_pending_bytes",
        "Payload bytes that have left and aren't in a file.",
        "pending_bytes",
    ),
    ("archived_experiences", "Experiences in the archive's files.", "num_rows"),
    ("archive_bytes", "Size of the archive's files.", "num_bytes"),
    ("archive_oldest_timestamp_seconds", "When the first of it has left.", "oldest_time"),
)
_CONSUMER_GAUGES = (
    ("ready_units", "Units that can be sampled now.", "num_ready_units"),
    ("leased_units", "Units on lease.", "num_leased_units"),
    ("open_leases", "Leases that are open.", "num_leases"),
    ("waiting_samples", "Sample calls and streams that wait.", "num_waiting"),
    ("held_units", "Units of policy versions that aren't published.", "num_held_units"),
    ("units_in_quarantine", "Units that came back too often.", "num_quarantined_units"),
    (
        "retained_experiences",
        "Acknowledged deliveries that can be rewound.",
        "num_retained_experiences",
    ),
)


class Gauges(Collector):
    """Collects from the event loop's thread; `collect` may be called from any other."""

    def __init__(
        self,
        snapshot: Callable[[], Sequence[BufferStats]],
        loop: asyncio.AbstractEventLoop,
        watched: Callable[[], Sequence[Watched]] = list,
    ) -> None:
        self._snapshot = snapshot
        self._watched = watched
        self._loop = loop

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known without collecting at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family per gauge.

        Raises:
            TimeoutError: The event loop did not answer.
        """
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        buffers, watched = asked.result(_TIMEOUT_SECONDS)
        kinds = ((GaugeMetricFamily, _BUFFER_GAUGES), (CounterMetricFamily, _BUFFER_COUNTERS))
        for kind, rows in kinds:
            for name, text, attribute in rows:
                of_buffers = kind(_PREFIX + name, text, labels=["buffer"])
                for stats in buffers:
                    if (number := getattr(stats, attribute)) is not None:
                        of_buffers.add_metric([stats.name], number)
                yield of_buffers
        for name, text, attribute in _ARCHIVE_GAUGES:
            of_buffers = GaugeMetricFamily(_PREFIX + name, text, labels=["buffer"])
            for stats in buffers:
                if stats.archive is not None:
                    of_buffers.add_metric([stats.name], getattr(stats.archive, attribute) or 0.0)
            yield of_buffers
        for name, text, attribute in _CONSUMER_GAUGES:
            family = GaugeMetricFamily(_PREFIX + name, text, labels=["buffer", "consumer"])
            for stats in buffers:
                for consumer in stats.consumers:
                    family.add_metric([stats.name, consumer.name], getattr(consumer, attribute))
            yield family
        yield from families(watched)

    async def _ask(self) -> tuple[Sequence[BufferStats], Sequence[Watched]]:
        return self._snapshot(), self._watched()
