"""What a buffer has, computed when somebody looks: for GetStats and for the gauges."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from experience_buffer import values
from experience_buffer_server.buffer.delivery.batch_picking import wait_of
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.leaving.removal import unit_key
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.group_table import groups_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.growth import LEAST_SECONDS, seconds_until

_MOST_HOLDERS: Final = 16
"""Of those who wait for one consumer, that are told by name."""
_OVER_SECONDS: Final = 300.0
"""How far back what is to come is told by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats(values.BufferStats):
    """The state of one buffer: what callers are told, and what is only counted."""

    num_used: int
    """Experiences acknowledged for the first time, again after a rewind, since the start."""
    num_unused: int
    """Experiences that left without ever having been acknowledged, since the start."""


def buffer_stats(flow: Flow) -> BufferStats:
    """Say what a buffer holds: in time that grows with what is unfinished, not with what is stored."""
    contents, usage = flow.state.contents, flow.state.progress.usage
    limits = _limits(flow)
    return BufferStats(
        name=flow.state.name,
        num_items=contents.num_items,
        num_bytes=contents.num_bytes,
        num_open_groups=len(contents.groups.open_groups),
        num_overdue_groups=_num_overdue(flow),
        num_computing_groups=flow.computing.num_jobs,
        num_quarantined_groups=len(
            # Without groups each counts for itself.
            {unit_key(entry) for entry in contents.quarantined.values()}
        ),
        oldest_open_group=flow.grouping.describe(),
        policy_version=flow.state.row.policy_version,
        consumers=tuple(
            _consumer_stats(flow, consumer) for consumer in flow.state.consumers.values()
        ),
        num_waiting_for_fields=len(contents.lacking),
        computing_waits_for=flow.describe_computing(),
        num_damaged=sum(bool(entry.damage) for entry in contents.quarantined.values()),
        num_reserved_groups=len(flow.pacing.reservations),
        num_used=usage.num_used,
        num_unused=usage.num_unused,
        keep_ratio=usage.keep_ratio,
        num_waiting_pushes=flow.push_room.num_waiting,
        pushes_wait_for=flow.push_room.describe_line() or flow.push_room.describe_full(),
        archive=_archive_stats(flow),
        max_items=flow.state.settings.max_items,
        max_bytes=flow.state.settings.max_bytes,
        used_ratio=max((used / most for used, most, _ in limits.values()), default=None),
        **_forecast(limits),
    )


def _limits(flow: Flow) -> dict[str, tuple[int, int, float | None]]:
    """What is used of each limit that the buffer has, the limit, and how fast that grows per second."""
    contents, settings, now = flow.state.contents, flow.state.settings, clock.now()
    before = next(flow.state.telemetry.trends.points(now - _OVER_SECONDS), None)
    items = num_bytes = None
    if before is not None and (seconds := now - before.time) >= LEAST_SECONDS:
        items = (contents.num_items - before.num_items) / seconds
        num_bytes = (contents.num_bytes - before.num_bytes) / seconds
    limits = {
        "max_items": (contents.num_items, settings.max_items, items),
        "max_bytes": (contents.num_bytes, settings.max_bytes, num_bytes),
    }
    return {name: limit for name, limit in limits.items() if limit[1]}


def _forecast(limits: Mapping[str, tuple[int, int, float | None]]) -> dict[str, Any]:
    """When the first of the limits will be reached, and which."""
    times = {
        name: seconds
        for name, (used, most, per_second) in limits.items()
        if (seconds := seconds_until(most - used, per_second)) is not None
    }
    first = min(times, key=lambda name: times[name], default="")
    return {"full_in_seconds": times.get(first), "full_by": first}


def _archive_stats(flow: Flow) -> values.ArchiveStats | None:
    box, settings = flow.state.outbox, flow.state.settings.archive
    if settings is None and not box and not box.files.num_segments:
        return None
    return values.ArchiveStats(
        num_pending=len(box),
        pending_bytes=box.num_bytes,
        pending_since_time=box.oldest_time or None,
        num_segments=box.files.num_segments,
        num_rows=box.files.num_rows,
        num_bytes=box.files.num_bytes,
        oldest_time=box.files.oldest_time or None,
        num_archived=box.counts.num_archived,
        num_lost=box.counts.num_lost,
        num_refused_lost=box.counts.num_refused_lost,
        trouble=box.files.trouble,
    )


def _num_overdue(flow: Flow) -> int:
    """Unfinished groups past their deadline: they are open, or lack fields."""
    if not flow.state.settings.group_deadline_seconds:
        return 0
    contents = flow.state.contents
    num_open = sum(group.overdue for group in contents.groups.open_groups)
    lacking = (
        entry
        for entry in contents.lacking.values()
        if entry.group is not None and entry.group.overdue and not entry.group.is_open
    )
    return num_open + sum(group.is_unfinished for group in groups_of(lacking))


def _consumer_stats(flow: Flow, consumer: Consumer) -> values.ConsumerStats:
    first = consumer.waiters[0] if consumer.waiters else None
    size = consumer.asked_batch_size or 1 if first is None else first.want.batch_size
    wait = wait_of(flow.state, consumer, size)
    waits = first is not None or bool(wait.label)
    return values.ConsumerStats(
        name=consumer.name,
        unit=consumer.settings.unit,
        num_ready_units=len(consumer.ready),
        num_leased_units=consumer.num_leased,
        num_leases=len(consumer.leases),
        num_waiting=len(consumer.waiters),
        waiting_for=flow.line.explain_wait(consumer, size) if waits else "",
        num_acked_units=consumer.num_acked,
        num_redelivered_units=consumer.num_redelivered,
        num_quarantined_units=len(consumer.quarantined),
        num_held_units=len(consumer.held),
        num_retained_experiences=consumer.timeline.num_retained,
        last_step=consumer.timeline.last_step,
        safe_step=consumer.timeline.safe_step,
        num_stale_units=consumer.num_stale,
        pushes_wait_for=flow.push_room.describe(consumer),
        waiting_seconds=None if first is None else max(time.monotonic() - first.since, 0.0),
        wait_reason=wait.label,
        asked_batch_size=consumer.asked_batch_size,
        waiting_holders=tuple(one.holder for one in islice(consumer.waiters, _MOST_HOLDERS)),
    )
