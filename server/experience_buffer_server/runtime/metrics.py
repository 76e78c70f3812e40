"""Every metric object of the server, behind verbs that say what happened.

Names follow Prometheus' conventions; labels are bounded: buffers, consumers, methods, reasons.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from experience_buffer_server import __version__
from experience_buffer_server.runtime.metric_series import SeriesByBuffer

Verb: TypeAlias = Callable[..., None]
_Metric = TypeVar("_Metric", Counter, Histogram)

_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_CALLS = (*_FAST, 5, 10, 30, 60, 300, 3600)
_SLOW = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_PREFIX = "experience_buffer_"
DEPRECATED = "Goes with the next version; use"
"""Begins what is said of a metric that has another name now, which follows."""
_FRESH = "fresh"
"""The reason of a wait for units that are fresh enough: of others there are enough."""
_FLAGS = ("singleton", "zero_variance", "zero_mask", "bootstrapped", "masked", "withheld")


class Metrics:
    """The server's metrics, behind verbs that can be called from any thread.

    A verb that is a counter takes the values of its labels, and then how many there are to count, 1
    if it isn't said; one that is a histogram takes them, and then what was observed. Values of
    labels that are neither a buffer nor a consumer are each one of a fixed few.
    """

    def __init__(self) -> None:
        # When each series began: as many again, and nobody asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        built = ("version", "python_version", "implementation")
        build_info = Gauge(_PREFIX + "build_info", "What runs here; 1.", built, registry=registry)
        build_info.labels(
            __version__, platform.python_version(), platform.python_implementation()
        ).set(1)

        self._by_buffer = SeriesByBuffer()

        def counter(name: str, text: str, *labels: str, prefix: str = _PREFIX) -> Verb:
            metric = Counter(prefix + name, text, labels, registry=registry)
            series, num_labels = self._series(metric, labels), len(labels)

            def count(*values: Any) -> None:
                if len(values) == num_labels:
                    series(*values).inc()
                else:
                    series(*values[:-1]).inc(values[-1])

            return count

        def histogram(
            name: str, text: str, buckets: Sequence[float], *labels: str, prefix: str = _PREFIX
        ) -> Verb:
            metric = Histogram(prefix + name, text, labels, registry=registry, buckets=buckets)
            series = self._series(metric, labels)

            def observe(*values: Any) -> None:
                series(*values[:-1]).observe(values[-1])

            return observe

        def gauge(name: str, text: str) -> Callable[[float], None]:
            return Gauge(_PREFIX + name, text, registry=registry).set

        buffer, consumer = "buffer", "consumer"
        self.pushed = counter(
            "pushed_experiences", "Pushed experiences by outcome.", buffer, "outcome", "reason"
        )
        self.pushed_bytes = counter("pushed_bytes", "Bytes of pushed payloads.", buffer)
        self.payload_read = counter(
            "read_payloads", "Pushed payloads by reader: compiled, or checked.", "reader"
        )
        self._closed_groups = counter(
            "closed_groups", "Groups closed, by reason.", buffer, "reason"
        )
        self._groups_closed = counter(
            "groups_closed", f"{DEPRECATED} {_PREFIX}closed_groups_total.", buffer, "reason"
        )
        self._sampled = counter(
            "sampled_experiences", "Experiences delivered, repeats counted.", buffer, consumer
        )
        self._sampled_bytes = counter("sampled_bytes", "Payload bytes delivered.", buffer, consumer)
        self.acked = counter("acked_experiences", "Experiences acknowledged.", buffer, consumer)
        self.redelivered = counter(
            "redelivered_experiences", "Experiences offered again.", buffer, consumer, "reason"
        )
        self.dropped = counter(
            "dropped_experiences", "Experiences removed without being consumed.", buffer, "reason"
        )
        self.archive_lost = counter(
            "archive_lost_experiences",
            "Experiences that were to be archived and have left without.", buffer,
        )  # fmt: skip
        self.shortfall = counter(
            "sample_shortfalls", "Sample calls answered with less than asked.", buffer, consumer
        )
        self._commit = histogram("commit_seconds", "Writing and fsync, per transaction.", _FAST)
        self._commit_batches = histogram(
            "commit_batches", "Writes that shared a transaction.", (1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.computed = histogram(
            "advantage_seconds", "Launch of an advantage computation.", _FAST, "estimator"
        )
        self.groups_computed = counter(
            "advantage_groups", "Groups by outcome of their computation.",
            buffer, "estimator", "outcome",
        )  # fmt: skip
        self._advantage_flags = counter(
            "advantage_flagged_experiences", "Computed experiences by what is special about them.",
            buffer, "flag",
        )  # fmt: skip
        self._clip_ratio = histogram(
            "clip_ratio", "Fraction of a group's rewards or advantages outside the clip.",
            (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), buffer, "stage",
        )  # fmt: skip
        self.push_refused = counter(
            "pushes_held_back", "Pushes and new tasks told to come again, by reason.",
            buffer, "reason",
        )  # fmt: skip
        self.push_wait_began = counter(
            "push_waits", "Pushes that had to wait in line for room, by the limit.",
            buffer, "reason",
        )  # fmt: skip
        self.push_waited = counter(
            "push_waited_seconds", "Time that pushes waited in line for room, by the limit.",
            buffer, "reason",
        )  # fmt: skip
        self.call_refused = counter(
            "calls_refused", "Calls and streams told to come again, by the limit.", "reason"
        )
        self.memory_asked = counter(
            "shared_memory_streams",
            "Streams that asked for shared memory, by what they got: shared, or why none.", "result",
        )  # fmt: skip
        for result in ("shared", "elsewhere", "max_shared_bytes", "system"):
            self.memory_asked(result, 0)
        self.set_shared_bytes = gauge(
            "shared_memory_bytes", "Memory shared with clients on this machine."
        )
        self._waits = counter(
            "sample_waits", "Sample calls that had to wait, by what kept them at first.",
            buffer, consumer, "reason",
        )  # fmt: skip
        self._waited = counter(
            "sample_waited_seconds", "Time that sample calls waited, by what kept them meanwhile.",
            buffer, consumer, "reason",
        )  # fmt: skip
        self._depth = histogram(
            "sample_wait_ready_units", "Units ready when a sample call began to wait.",
            (0, 1, 4, 16, 64, 256, 1024, 4096, 16384), buffer, consumer,
        )  # fmt: skip
        self.stale = counter(
            "stale_experiences", "Experiences too stale to be delivered, by what became of them.",
            buffer, consumer, "policy", "reason",
        )  # fmt: skip
        self.unit_quarantined = counter(
            "quarantined_units", "Units that came back without an acknowledgement too often.",
            buffer, consumer,
        )  # fmt: skip
        self.sample_wait = histogram(
            "sample_wait_seconds", "Wait of sample calls for a batch.", _SLOW, buffer, consumer
        )
        self._staleness = Histogram(
            _PREFIX + "staleness_versions", "Policy versions behind, at delivery.",
            (buffer, consumer), registry=registry, buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
        )  # fmt: skip
        self._age = Histogram(
            _PREFIX + "queue_age_seconds", "Push to delivery, per experience.",
            (buffer, consumer), registry=registry, buckets=_SLOW,
        )  # fmt: skip
        self.access_refused = counter(
            "access_refusals", "Calls that their callers may not make, by reason.",
            "method", "reason",
        )  # fmt: skip
        self.files_read = counter(
            "credential_reloads", "Changed certificates or grants that were read: ok, or not.",
            "section", "outcome",
        )  # fmt: skip
        self.snapshot_failed = self._snapshots = counter(
            "snapshots", "Snapshots by outcome.", "outcome"
        )
        self._snapshot_seconds = histogram(
            "snapshot_seconds", "Copying and checking, per snapshot.", _SLOW
        )
        self._set_snapshot_bytes = gauge("snapshot_bytes", "Size of the newest snapshot.")
        self._set_snapshot_timestamp = gauge(
            "snapshot_timestamp_seconds",
            "When the newest snapshot was taken, Unix time; NaN: none was.",
        )
        self._set_snapshot_time = gauge(
            "snapshot_time_seconds", f"{DEPRECATED} {_PREFIX}snapshot_timestamp_seconds."
        )
        self.snapshot_found(num_bytes=math.nan, create_time=math.nan)
        rpc = ("grpc_type", "grpc_service", "grpc_method")
        self._http_requests = counter(
            "http_requests", "HTTP requests, by the address's form and the status; 0: none was sent.",
            "route", "code",
        )  # fmt: skip
        self._http_seconds = histogram(
            "http_seconds", "Answering HTTP requests, those for events left out.", _CALLS, "route"
        )
        self.rpc_started = counter("grpc_server_started", "RPCs started.", *rpc, prefix="")
        self._rpc_handled = counter(
            "grpc_server_handled", "RPCs completed.", *rpc, "grpc_code", prefix=""
        )
        self._rpc_seconds = histogram(
            "grpc_server_handling_seconds", "Duration of RPCs.", _CALLS, *rpc, prefix=""
        )

    def _series(self, metric: _Metric, labels: Sequence[str]) -> Callable[..., _Metric]:
        """What finds the series of a metric; one that isn't a buffer's stays, and is looked up once."""
        if not labels:
            return lambda: metric
        if labels[0] == "buffer":
            return partial(self._by_buffer.of, metric)
        return cache(metric.labels)

    def forget_buffer(self, buffer: str) -> None:
        """A buffer was deleted: its series end, or those of all buffers that ever were would stay."""
        self._by_buffer.forget(buffer)

    def keep_buffers(self, buffers: Collection[str]) -> None:
        """There are no other buffers: series of others end, as when they are deleted."""
        self._by_buffer.keep(buffers)

    def group_closed(self, buffer: str, reason: str) -> None:
        """A group takes no more members."""
        self._closed_groups(buffer, reason)
        self._groups_closed(buffer, reason)

    def sampled(
        self,
        buffer: str,
        consumer: str,
        *,
        num_bytes: int,
        ages: Sequence[float],
        staleness: Iterable[int],
    ) -> None:
        """A batch was delivered: one age in seconds per experience."""
        self._sampled(buffer, consumer, len(ages))
        self._sampled_bytes(buffer, consumer, num_bytes)
        observe_age = self._by_buffer.of(self._age, buffer, consumer).observe
        for age in ages:
            observe_age(max(age, 0.0))
        observe_staleness = self._by_buffer.of(self._staleness, buffer, consumer).observe
        for versions in staleness:
            observe_staleness(versions)

    def wait_began(self, buffer: str, consumer: str, reason: str, num_ready: int) -> None:
        """A sample call has to wait; `reason` is one of a fixed few."""
        self._waits(buffer, consumer, reason or _FRESH)
        self._depth(buffer, consumer, num_ready)

    def waited(self, buffer: str, consumer: str, seconds: Mapping[str, float]) -> None:
        """A sample call waited in line for so long; by reason, which is one of a fixed few."""
        for reason, of_one in seconds.items():
            self._waited(buffer, consumer, reason or _FRESH, of_one)

    def written(self, num_transactions: int, num_batches: int, seconds: float) -> None:
        """The store's writer has put batches on disk, in one or several transactions."""
        for _ in range(num_transactions):
            self._commit(seconds / num_transactions)
            self._commit_batches(num_batches / num_transactions)

    def advantages(self, buffer: str, details: Sequence[Mapping[str, Any]]) -> None:
        """A group's advantages are there, or withheld: one mapping of details per experience."""
        for flag in _FLAGS:
            if count := sum(bool(of_one.get(flag)) for of_one in details):
                self._advantage_flags(buffer, flag, count)
        for stage in ("reward", "advantage"):
            ratio = details[0].get(f"{stage}_clip_fraction")
            if ratio is not None:
                self._clip_ratio(buffer, stage, ratio)

    def snapshot_taken(self, *, seconds: float, num_bytes: int, create_time: float) -> None:
        """A snapshot is on disk; `create_time` is in seconds since the Unix epoch."""
        self._snapshots("taken")
        self._snapshot_seconds(seconds)
        self.snapshot_found(num_bytes=num_bytes, create_time=create_time)

    def snapshot_found(self, *, num_bytes: float, create_time: float) -> None:
        """The newest snapshot there is."""
        self._set_snapshot_bytes(num_bytes)
        self._set_snapshot_timestamp(create_time)
        self._set_snapshot_time(create_time)

    def http_answered(self, route: str, code: str, seconds: float) -> None:
        """An HTTP request has ended.

        Args:
            route: The form of its address, of a bounded number.
            code: The status; "0": none was sent.
            seconds: From its beginning to the end of the answer.
        """
        self._http_requests(route, code)
        if not route.endswith("/events"):
            self._http_seconds(route, seconds)

    def rpc_handled(self, kind: str, service: str, method: str, code: str, seconds: float) -> None:
        """An RPC ended."""
        self._rpc_handled(kind, service, method, code)
        self._rpc_seconds(kind, service, method, seconds)
