"""What a buffer has, computed when somebody looks: for GetStats and for the gauges."""

from __future__ import annotations

from dataclasses import dataclass

from experience_buffer import values
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.leaving.removal import unit_key
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.group_table import groups_of


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
    return values.ConsumerStats(
        name=consumer.name,
        unit=consumer.settings.unit,
        num_ready_units=len(consumer.ready),
        num_leased_units=consumer.num_leased,
        num_leases=len(consumer.leases),
        num_waiting=len(consumer.waiters),
        waiting_for=(flow.line.explain_wait(consumer, first.want.batch_size) if first else ""),
        num_acked_units=consumer.num_acked,
        num_redelivered_units=consumer.num_redelivered,
        num_quarantined_units=len(consumer.quarantined),
        num_held_units=len(consumer.held),
        num_retained_experiences=consumer.timeline.num_retained,
        last_step=consumer.timeline.last_step,
        safe_step=consumer.timeline.safe_step,
        num_stale_units=consumer.num_stale,
        pushes_wait_for=flow.push_room.describe(consumer),
    )
