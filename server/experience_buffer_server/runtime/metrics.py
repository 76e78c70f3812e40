"""Every metric object of the server, behind verbs that say what happened.

Names follow Prometheus' conventions; labels are bounded: buffers, consumers, methods, reasons.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from experience_buffer_server.runtime.metric_series import SeriesByBuffer

_log = logging.getLogger(__name__)

_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_CALLS = (*_FAST, 5, 10, 30, 60, 300, 3600)
_SLOW = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_PREFIX = "experience_buffer_"
_FRESH = "fresh"
"""The reason of a wait for units that are fresh enough: of others there are enough."""
_FLAGS = ("singleton", "zero_variance", "zero_mask", "bootstrapped", "masked", "withheld")


class Metrics:
    """The server's metrics. Its verbs can be called from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        self._by_buffer = SeriesByBuffer()
        self._of = self._by_buffer.of

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, registry=registry, buckets=buckets)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=registry)

        buffer, consumer = "buffer", "consumer"
        self._pushed = counter(
            "pushed_experiences", "Pushed experiences by outcome.", buffer, "outcome", "reason"
        )
        self._pushed_bytes = counter("pushed_bytes", "Bytes of pushed payloads.", buffer)
        self._read_payloads = cache(
            counter(
                "read_payloads", "Pushed payloads by reader: compiled, or checked.", "reader"
            ).labels
        )
        self._closed = counter("groups_closed", "Groups closed, by reason.", buffer, "reason")
        self._sampled = counter(
            "sampled_experiences", "Experiences delivered, repeats counted.", buffer, consumer
        )
        self._sampled_bytes = counter("sampled_bytes", "Payload bytes delivered.", buffer, consumer)
        self._acked = counter("acked_experiences", "Experiences acknowledged.", buffer, consumer)
        self._redelivered = counter(
            "redelivered_experiences", "Experiences offered again.", buffer, consumer, "reason"
        )
        self._dropped = counter(
            "dropped_experiences", "Experiences removed without being consumed.", buffer, "reason"
        )
        self._shortfalls = counter(
            "sample_shortfalls", "Sample calls answered with less than asked.", buffer, consumer
        )
        self._commit = histogram("commit_seconds", "Writing and fsync, per transaction.", _FAST)
        self._commit_batches = histogram(
            "commit_batches", "Batches that shared a transaction.", (1, 2, 4, 8, 16, 32, 64, 128)
        )
        self._advantage = histogram(
            "advantage_seconds", "Launch of an advantage computation.", _FAST, "estimator"
        )
        self._advantage_groups = counter(
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
        self._held_back = counter(
            "pushes_held_back", "Pushes and new tasks told to come again, by reason.",
            buffer, "reason",
        )  # fmt: skip
        self._push_waits = counter(
            "push_waits", "Pushes that had to wait in line for room, by the limit.",
            buffer, "reason",
        )  # fmt: skip
        self._push_waited = counter(
            "push_waited_seconds", "Time that pushes waited in line for room, by the limit.",
            buffer, "reason",
        )  # fmt: skip
        self._calls_refused = counter(
            "calls_refused", "Calls and streams told to come again, by the limit.", "reason"
        )
        self._memory_asked = counter(
            "shared_memory_streams",
            "Streams that asked for shared memory, by what they got: shared, or why none.", "result",
        )  # fmt: skip
        for result in ("shared", "elsewhere", "max_shared_bytes", "system"):
            self._memory_asked.labels(result)
        self._shared_bytes = gauge(
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
        self._stale = counter(
            "stale_experiences", "Experiences too stale to be delivered, by what became of them.",
            buffer, consumer, "policy", "reason",
        )  # fmt: skip
        self._quarantined = counter(
            "quarantined_units", "Units that came back without an acknowledgement too often.",
            buffer, consumer,
        )  # fmt: skip
        self._wait = histogram(
            "sample_wait_seconds", "Wait of sample calls for a batch.", _SLOW, buffer, consumer
        )
        self._staleness = histogram(
            "staleness_versions", "Policy versions behind, at delivery.",
            (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64), buffer, consumer,
        )  # fmt: skip
        self._age = histogram(
            "queue_age_seconds", "Push to delivery, per experience.", _SLOW, buffer, consumer
        )
        self._access_refused = counter(
            "access_refusals", "Calls that their callers may not make, by reason.",
            "method", "reason",
        )  # fmt: skip
        self._reloads = counter(
            "credential_reloads", "Changed certificates or grants that were read.",
            "section", "outcome",
        )  # fmt: skip
        self._snapshots = counter("snapshots", "Snapshots by outcome.", "outcome")
        self._snapshot_seconds = histogram(
            "snapshot_seconds", "Copying and checking, per snapshot.", _SLOW
        )
        self._snapshot_bytes = gauge("snapshot_bytes", "Size of the newest snapshot.")
        self._snapshot_time = gauge(
            "snapshot_time_seconds", "When the newest snapshot was taken, Unix time; NaN: none was."
        )
        for newest in (self._snapshot_bytes, self._snapshot_time):
            newest.set(math.nan)
        rpc = ("grpc_type", "grpc_service", "grpc_method")
        # Their series are looked up with every call, and are few.
        self._rpc_started = cache(
            Counter("grpc_server_started", "RPCs started.", rpc, registry=registry).labels
        )
        self._rpc_handled = cache(
            Counter(
                "grpc_server_handled", "RPCs completed.", (*rpc, "grpc_code"), registry=registry
            ).labels
        )
        self._rpc_seconds = cache(
            Histogram(
                "grpc_server_handling_seconds", "Duration of RPCs.", rpc, registry=registry,
                buckets=_CALLS,
            ).labels
        )  # fmt: skip

    def forget_buffer(self, buffer: str) -> None:
        """A buffer was deleted: its series end, or those of all buffers that ever were would stay."""
        self._by_buffer.forget(buffer)

    def keep_buffers(self, buffers: Collection[str]) -> None:
        """There are no other buffers: series of others end, as when they are deleted."""
        self._by_buffer.keep(buffers)

    def pushed(self, buffer: str, outcome: str, reason: str, count: int) -> None:
        """Items of a push had this outcome."""
        self._of(self._pushed, buffer, outcome, reason).inc(count)

    def pushed_bytes(self, buffer: str, num_bytes: int) -> None:
        """A payload came in."""
        self._of(self._pushed_bytes, buffer).inc(num_bytes)

    def group_closed(self, buffer: str, reason: str) -> None:
        """A group takes no more members."""
        self._of(self._closed, buffer, reason).inc()

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
        self._of(self._sampled, buffer, consumer).inc(len(ages))
        self._of(self._sampled_bytes, buffer, consumer).inc(num_bytes)
        observe_age = self._of(self._age, buffer, consumer).observe
        for age in ages:
            observe_age(max(age, 0.0))
        observe_staleness = self._of(self._staleness, buffer, consumer).observe
        for versions in staleness:
            observe_staleness(versions)

    def acked(self, buffer: str, consumer: str, count: int) -> None:
        """A lease was acknowledged."""
        self._of(self._acked, buffer, consumer).inc(count)

    def redelivered(self, buffer: str, consumer: str, reason: str, count: int) -> None:
        """A lease ended without an ack; `reason` is one of a fixed few."""
        self._of(self._redelivered, buffer, consumer, reason).inc(count)

    def dropped(self, buffer: str, reason: str, count: int) -> None:
        """Experiences left without being consumed."""
        self._of(self._dropped, buffer, reason).inc(count)

    def quarantined(self, buffer: str, uid: str, count: int, reason: str) -> None:
        """Experiences can't be delivered."""
        _log.warning(
            "quarantined %d experiences of buffer %r, the first is %r: %s",
            count, buffer, uid, reason,
        )  # fmt: skip

    def shortfall(self, buffer: str, consumer: str) -> None:
        """A sample call was answered with less than it asked for."""
        self._of(self._shortfalls, buffer, consumer).inc()

    def payload_read(self, reader: str) -> None:
        """A payload was read by the compiled reader or the checked one."""
        self._read_payloads(reader).inc()

    def push_refused(self, buffer: str, reason: str) -> None:
        """A push or a new task was held back; `reason` is one of a fixed few."""
        self._of(self._held_back, buffer, reason).inc()

    def push_wait_began(self, buffer: str, reason: str) -> None:
        """A push has to wait in line for room; `reason` is one of a fixed few."""
        self._of(self._push_waits, buffer, reason).inc()

    def push_waited(self, buffer: str, reason: str, seconds: float) -> None:
        """A push has left the line, with room or without."""
        self._of(self._push_waited, buffer, reason).inc(seconds)

    def memory_asked(self, result: str) -> None:
        """A stream asked for shared memory; `result` is one of a fixed few."""
        self._memory_asked.labels(result).inc()

    def set_shared_bytes(self, num_bytes: int) -> None:
        """So much memory is shared with clients."""
        self._shared_bytes.set(num_bytes)

    def call_refused(self, reason: str) -> None:
        """A call or stream was told to come again; `reason` is one of a fixed few."""
        self._calls_refused.labels(reason).inc()

    def wait_began(self, buffer: str, consumer: str, reason: str, num_ready: int) -> None:
        """A sample call has to wait; `reason` is one of a fixed few."""
        self._of(self._waits, buffer, consumer, reason or _FRESH).inc()
        self._of(self._depth, buffer, consumer).observe(num_ready)

    def waited(self, buffer: str, consumer: str, seconds: Mapping[str, float]) -> None:
        """A sample call waited in line for so long; by reason, which is one of a fixed few."""
        for reason, of_one in seconds.items():
            self._of(self._waited, buffer, consumer, reason or _FRESH).inc(of_one)

    def stale(self, buffer: str, consumer: str, policy: str, reason: str, count: int) -> None:
        """Experiences were too stale for a consumer; policy and reason are of a fixed few."""
        self._of(self._stale, buffer, consumer, policy, reason).inc(count)

    def unit_quarantined(self, buffer: str, consumer: str) -> None:
        """A unit isn't offered to a consumer any more."""
        self._of(self._quarantined, buffer, consumer).inc()

    def sample_wait(self, buffer: str, consumer: str, seconds: float) -> None:
        """A sample call has ended its wait."""
        self._of(self._wait, buffer, consumer).observe(seconds)

    def written(self, *, num_transactions: int, num_batches: int, seconds: float) -> None:
        """The store's writer has put batches on disk, in one or several transactions."""
        for _ in range(num_transactions):
            self._commit.observe(seconds / num_transactions)
            self._commit_batches.observe(num_batches / num_transactions)

    def computed(self, estimator: str, seconds: float) -> None:
        """A launch came back."""
        self._advantage.labels(estimator).observe(seconds)

    def groups_computed(self, buffer: str, estimator: str, outcome: str) -> None:
        """A group of a launch was computed, or failed."""
        self._of(self._advantage_groups, buffer, estimator, outcome).inc()

    def advantages(self, buffer: str, details: Sequence[Mapping[str, Any]]) -> None:
        """A group's advantages are there, or withheld: one mapping of details per experience."""
        for flag in _FLAGS:
            count = sum(bool(of_one.get(flag)) for of_one in details)
            if count:
                self._of(self._advantage_flags, buffer, flag).inc(count)
        for stage in ("reward", "advantage"):
            ratio = details[0].get(f"{stage}_clip_fraction")
            if ratio is not None:
                self._of(self._clip_ratio, buffer, stage).observe(ratio)

    def access_refused(self, method: str, reason: str) -> None:
        """A call was refused because of who made it; `reason` is one of a fixed few."""
        self._access_refused.labels(method, reason).inc()

    def files_read(self, section: str, outcome: str) -> None:
        """Files of a section of the configuration have changed, and were taken ("ok") or not."""
        self._reloads.labels(section, outcome).inc()

    def snapshot_taken(self, *, seconds: float, num_bytes: int, create_time: float) -> None:
        """A snapshot is on disk; `create_time` is in seconds since the Unix epoch."""
        self._snapshots.labels("taken").inc()
        self._snapshot_seconds.observe(seconds)
        self.snapshot_found(num_bytes=num_bytes, create_time=create_time)

    def snapshot_found(self, *, num_bytes: int, create_time: float) -> None:
        """The newest snapshot there is."""
        self._snapshot_bytes.set(num_bytes)
        self._snapshot_time.set(create_time)

    def snapshot_failed(self, outcome: str) -> None:
        """No snapshot was taken; `outcome` is one of a fixed few."""
        self._snapshots.labels(outcome).inc()

    def rpc_started(self, kind: str, service: str, method: str) -> None:
        """An RPC began."""
        self._rpc_started(kind, service, method).inc()

    def rpc_handled(self, kind: str, service: str, method: str, code: str, seconds: float) -> None:
        """An RPC ended."""
        self._rpc_handled(kind, service, method, code).inc()
        self._rpc_seconds(kind, service, method).observe(seconds)
