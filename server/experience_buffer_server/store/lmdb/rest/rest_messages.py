"""From the rows of one experience to what a scan brings of it, and whether a filter lets it pass. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from experience_buffer import errors
from experience_buffer._messages.names import STATE
from experience_buffer._tables import json_text
from experience_buffer.v1 import service_pb2
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    GroupRow,
    ProgressRow,
    Record,
)

_RANGES: Final[dict[str, Callable[[Any], Any]]] = {
    "reward": lambda summary: summary.reward if summary.HasField("reward") else None,
    "response_tokens": lambda summary: summary.response_tokens,
    "staleness": lambda summary: summary.staleness if summary.HasField("staleness") else None,
    "push_time": lambda summary: summary.push_time,
}


def check_filter(where: service_pb2.Filter) -> None:
    """Refuse what only a server knows.

    Raises:
        InvalidRequestError: The filter asks for it.
    """
    if where.state not in (0, STATE.by_name["tombstone"], STATE.by_name["quarantined"]):
        raise errors.InvalidRequestError(
            "of a store at rest, state is quarantined or tombstone: where it is for its consumers only "
            "its server knows; ask that, or leave it out",
            subject="state",
        )
    if where.HasField("truncated"):
        raise errors.InvalidRequestError(
            "of a store at rest, truncated can't be filtered by: export all, and look at that column",
            subject="truncated",
        )


def times_sampled(known: ProgressRow | None) -> int:
    """Deliveries that were acknowledged, over all consumers."""
    if known is None:
        return 0
    once = {*known.acked}.difference(known.times_sampled, known.passed_over)
    return len(once) + sum(known.times_sampled.values())


def message_of(
    buffer: BufferRow,
    record: Record,
    known: ProgressRow | None,
    computed: AdvantageRow | None,
    group: GroupRow | None,
    where: service_pb2.Filter,
    *,
    with_payloads: bool,
) -> service_pb2.ScannedExperience | None:
    """An experience without its payload; None where the filter doesn't let it pass."""
    message = service_pb2.ScannedExperience(
        times_sampled=times_sampled(known), cursor=buffer.cursor(record.seq)
    )
    summary = message.summary
    summary.uid, summary.tid, summary.rid, summary.sid = (
        record.uid, record.tid, record.rid, record.sid,
    )  # fmt: skip
    if record.tombstone:
        summary.state = STATE.by_name["tombstone"]
    elif record.note:
        summary.state = STATE.by_name["quarantined"]
    if record.reward is not None:
        summary.reward = record.reward
    summary.response_tokens, summary.payload_bytes = record.response_tokens, record.payload_bytes
    if record.min_version is not None:
        summary.min_policy_version = record.min_version
        if buffer.policy_version is not None:
            summary.staleness = buffer.policy_version - record.min_version
    if record.max_version is not None:
        summary.max_policy_version = record.max_version
    summary.push_time, summary.message = record.push_time, record.note
    summary.priority, summary.generation = record.priority, record.generation
    if group is not None:
        summary.group = group.key
    if computed is not None:
        message.details = json_text.encoded(computed.details, metadata_bytes=0) or ""
        message.flags.extend(computed.flags)
        if with_payloads:
            message.advantages = computed.advantages
            if computed.returns != computed.advantages:
                message.returns = computed.returns
    return message if _passes(where, message, known) else None


def _passes(
    where: service_pb2.Filter, message: service_pb2.ScannedExperience, known: ProgressRow | None
) -> bool:
    if not where.ByteSize():
        return True
    summary = message.summary
    for name in ("tid", "rid", "sid"):
        if getattr(where, name) and getattr(where, name) != getattr(summary, name):
            return False
    if where.state and where.state != summary.state:
        return False
    if where.text not in summary.uid or not summary.uid.startswith(where.uid_prefix):
        return False
    if not {*where.flags} <= {*message.flags}:
        return False
    for name, value_of in _RANGES.items():
        low: Any = f"min_{name}"
        high: Any = f"max_{name}"
        has_low, has_high = where.HasField(low), where.HasField(high)
        if has_low or has_high:
            value = value_of(summary)
            if value is None:
                return False
            if has_low and value < getattr(where, low):
                return False
            if has_high and value > getattr(where, high):
                return False
    return _has_version(where, summary) and _was_acked(where, known)


def _has_version(where: service_pb2.Filter, summary: Any) -> bool:
    has_low = where.HasField("min_policy_version")
    has_high = where.HasField("max_policy_version")
    if not (has_low or has_high):
        return True
    if not summary.HasField("min_policy_version"):
        return False
    if has_low and summary.max_policy_version < where.min_policy_version:
        return False
    return not (has_high and summary.min_policy_version > where.max_policy_version)


def _was_acked(where: service_pb2.Filter, known: ProgressRow | None) -> bool:
    if not where.HasField("step"):
        return True
    steps = {} if known is None else known.steps
    if where.consumer:
        return where.step in steps.get(where.consumer, ())
    return any(where.step in each for each in steps.values())
