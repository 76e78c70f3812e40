"""What a scan brings, from messages to values: written out, since it may be millions."""

from __future__ import annotations

from typing import Any, Final

from experience_buffer._messages.names import STATE
from experience_buffer.scanned import ScannedExperience
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2
from experience_buffer.values import ExperienceSummary

_OPTIONAL: Final = (
    *("reward", "min_policy_version", "max_policy_version", "staleness", "magnitude"),
    "truncated",
)


def scanned(message: pb.ScannedExperience) -> ScannedExperience:
    """One experience."""
    return ScannedExperience(
        summary=_summary(message.summary),
        times_sampled=message.times_sampled,
        flags=tuple(message.flags),
        payload=message.payload,
        advantages=message.advantages,
        returns=message.returns or message.advantages,
        details=message.details,
        problem=message.damage,
        cursor=message.cursor,
        lease_id=message.lease_id,
        unit=message.unit,
        rank=message.rank,
    )


def _summary(message: types_pb2.ExperienceSummary) -> ExperienceSummary:
    some: dict[str, Any] = {
        name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL
    }
    state: Any = STATE.name(message.state)
    return ExperienceSummary(
        uid=message.uid,
        tid=message.tid,
        rid=message.rid,
        sid=message.sid,
        state=state,
        response_tokens=message.response_tokens,
        payload_bytes=message.payload_bytes,
        push_time=message.push_time,
        message=message.message,
        priority=message.priority,
        generation=message.generation,
        group=message.group,
        **some,
    )
