"""What a buffer has, computed when somebody looks: for GetStats and for the gauges."""

from __future__ import annotations

from dataclasses import dataclass

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.group_table import groups_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStats:
    """The state of one consumer."""

    name: str
    unit: str
    num_ready_units: int
    num_leased_units: int
    num_leases: int
    num_waiting: int
    waiting_for: str
    """What the longest-waiting call waits for; empty when none waits."""
    num_acked_units: int
    num_redelivered_units: int
    num_quarantined_units: int
    num_held_units: int
    """Of policy versions that aren't published yet."""
    num_retained_experiences: int
    """Acknowledged deliveries that can be rewound."""
    last_step: int | None
    safe_step: int | None
    num_stale_units: int
    pushes_wait_for: str
    """What keeps pushes from being accepted, by its limiter; empty when nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """The state of one buffer."""

    name: str
    num_items: int
    num_bytes: int
    num_open_groups: int
    num_overdue_groups: int
    num_computing_groups: int
    num_quarantined_groups: int
    oldest_open_group: str
    policy_version: int | None
    consumers: tuple[ConsumerStats, ...]
    num_waiting_for_fields: int
    """Experiences that lack a field the estimator needs."""
    num_damaged: int
    """Experiences set aside: a row of theirs can't be read back."""
    num_reserved_groups: int
    computing_waits_for: str
    """Missing fields, or a batch that isn't full, in words; empty when it waits for nothing."""
    num_used: int
    """Experiences acknowledged for the first time, again after a rewind, since the start."""
    num_unused: int
    """Experiences that left without ever having been acknowledged, since the start."""
    num_waiting_pushes: int
    """Pushes that wait in line for room."""
    pushes_wait_for: str
    """What they wait for, in words; empty when none waits."""
    keep_ratio: float | None
    """Of those two, less what was rewound, the part that was used; None: neither happened yet."""


def buffer_stats(buffer: Buffer) -> BufferStats:
    """Say what a buffer holds: in time that grows with what is unfinished, not with what is stored."""
    contents, usage = buffer.contents, buffer.desk.progress.usage
    return BufferStats(
        name=buffer.name,
        num_items=contents.num_items,
        num_bytes=contents.num_bytes,
        num_open_groups=len(contents.groups.open_groups),
        num_overdue_groups=_num_overdue(buffer),
        num_computing_groups=buffer.computing.num_jobs,
        num_quarantined_groups=len(
            {
                # Without groups each counts for itself.
                -entry.record.seq if entry.group is None else entry.group.row.id
                for entry in contents.quarantined.values()
            }
        ),
        oldest_open_group=buffer.grouping.describe(),
        policy_version=buffer.row.policy_version,
        consumers=tuple(
            _consumer_stats(buffer, consumer) for consumer in buffer.delivery.consumers.values()
        ),
        num_waiting_for_fields=len(contents.lacking),
        computing_waits_for=buffer.describe_computing(),
        num_damaged=buffer.damage.num_experiences,
        num_reserved_groups=buffer.pacing.num_reserved,
        num_used=usage.num_used,
        num_unused=usage.num_unused,
        keep_ratio=usage.keep_ratio,
        num_waiting_pushes=len(buffer.ingest.line),
        pushes_wait_for=buffer.ingest.line.describe(),
    )


def _num_overdue(buffer: Buffer) -> int:
    """Unfinished groups past their deadline: they are open, or lack fields."""
    if not buffer.settings.group_deadline_seconds:
        return 0
    contents = buffer.contents
    num_open = sum(group.overdue for group in contents.groups.open_groups)
    lacking = (
        entry
        for entry in contents.lacking.values()
        if entry.group is not None and entry.group.overdue and not entry.group.is_open
    )
    return num_open + sum(group.is_unfinished for group in groups_of(lacking))


def _consumer_stats(buffer: Buffer, consumer: Consumer) -> ConsumerStats:
    first = consumer.waiters[0] if consumer.waiters else None
    return ConsumerStats(
        name=consumer.name,
        unit=consumer.settings.unit,
        num_ready_units=len(consumer.ready),
        num_leased_units=consumer.num_leased,
        num_leases=len(consumer.leases),
        num_waiting=len(consumer.waiters),
        waiting_for=(
            buffer.desk.line.explain_wait(consumer, first.want.batch_size) if first else ""
        ),
        num_acked_units=consumer.totals.acked,
        num_redelivered_units=consumer.totals.redelivered,
        num_quarantined_units=len(consumer.quarantined),
        num_held_units=len(consumer.held),
        num_retained_experiences=consumer.timeline.num_retained,
        last_step=consumer.timeline.last_step,
        safe_step=consumer.timeline.safe_step,
        num_stale_units=consumer.totals.stale,
        pushes_wait_for=buffer.intake.describe(consumer),
    )
