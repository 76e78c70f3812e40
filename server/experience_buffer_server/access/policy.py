"""What each call takes: the roles that may make it, and the buffers that it names.

A call without a rule is refused wherever there are grants. docs/access.md has the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from experience_buffer.v1 import service_pb2
from experience_buffer_server.access.grants import EVERY_BUFFER
from experience_buffer_server.settings.access import ROLES

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].full_name


@dataclass(frozen=True, slots=True)
class Rule:
    """What one call takes."""

    roles: frozenset[str]
    """Any of these will do; empty: no grant is needed at all."""
    buffer: Callable[[Any], str | None]
    """The buffer that a request names; None: none, or still the one named before on its stream."""
    is_audited: bool = False
    """It administers: each is logged with its outcome."""
    max_request_bytes: int = 0
    """The most that a request may have; 0: `server.max_message_bytes`."""


def _none(request: Any) -> None:
    return None


def _opened(request: Any) -> str | None:
    return str(request.open.buffer) if request.WhichOneof("message") == "open" else None


_buffer = attrgetter("buffer")
_named = attrgetter("name")
_configured = attrgetter("config.name")


def _stated(request: Any) -> str | None:
    """None where it asks for all that the caller may see."""
    return request.buffer or None


_PUSH = frozenset(("push",))
_SAMPLE = frozenset(("sample",))
_LOOK = frozenset(("look", "sample"))
"""Who may take it may see it, too."""
_EITHER = frozenset(("push", "sample"))
_ANY = frozenset(("push", "sample", "look"))
_OPERATE = frozenset(("operate",))
ANYONE: frozenset[str] = frozenset()
ANY_GRANT = frozenset(ROLES)
_MAX_SMALL_BYTES = 4096
"""Of a request that holds no more than a name."""
_HEALTH = Rule(ANYONE, _none, max_request_bytes=_MAX_SMALL_BYTES)
METRICS = Rule(frozenset(("metrics",)), _none)
"""What the metrics endpoint takes."""

_CALLS: dict[str, Rule] = {
    "Push": Rule(_PUSH, _buffer),
    "PushStream": Rule(_PUSH, attrgetter("push.buffer")),
    "SealGroup": Rule(_PUSH, _buffer),
    "DropGroup": Rule(_PUSH, _buffer, is_audited=True),
    "ReserveGroups": Rule(_PUSH, _buffer),
    "Sample": Rule(_SAMPLE, _buffer),
    "SampleStream": Rule(_SAMPLE, _opened),
    "Ack": Rule(_SAMPLE, _buffer),
    "Nack": Rule(_SAMPLE, _buffer),
    "ExtendLease": Rule(_SAMPLE, _buffer),
    "Rewind": Rule(_SAMPLE, _buffer, is_audited=True),
    "DeclareSafe": Rule(_SAMPLE, _buffer, is_audited=True),
    "UpdatePriorities": Rule(_SAMPLE, _buffer),
    "Get": Rule(_LOOK, _buffer),
    "List": Rule(_LOOK, _buffer),
    "ListGroups": Rule(_LOOK, _buffer),
    "GetGroup": Rule(_LOOK, _buffer),
    "ListLeases": Rule(_LOOK, _buffer),
    "ListSteps": Rule(_LOOK, _buffer),
    "ListDepartures": Rule(_LOOK, _buffer),
    "Scan": Rule(_LOOK, _buffer),
    "GetTrends": Rule(_ANY, _buffer),
    "PublishPolicyVersion": Rule(_SAMPLE, _buffer),
    "Annotate": Rule(_EITHER, _buffer),
    "WatchPolicyVersion": Rule(_ANY, _buffer),
    "GetBuffer": Rule(_ANY, _named),
    "ListBuffers": Rule(_ANY, _none),
    "GetStats": Rule(_ANY, _stated),
    "Delete": Rule(_OPERATE, _buffer, is_audited=True),
    "CreateBuffer": Rule(_OPERATE, _configured, is_audited=True),
    "UpdateBuffer": Rule(_OPERATE, _configured, is_audited=True),
    "DeleteBuffer": Rule(_OPERATE, _named, is_audited=True),
    "ReleaseQuarantined": Rule(_OPERATE, _buffer, is_audited=True),
    "Snapshot": Rule(_OPERATE, lambda request: EVERY_BUFFER, is_audited=True),
}

RULES: Mapping[str, Rule] = MappingProxyType(
    {f"/{_SERVICE}/{method}": rule for method, rule in _CALLS.items()}
    | {
        # Of HTTP alone.
        "/metrics": METRICS,
        # Orchestrators and load balancers ask without credentials; the answer is one bit.
        "/grpc.health.v1.Health/Check": _HEALTH,
        "/grpc.health.v1.Health/List": _HEALTH,
        "/grpc.health.v1.Health/Watch": _HEALTH,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(
            ANY_GRANT, _none, max_request_bytes=_MAX_SMALL_BYTES
        ),
    }
)
"""By full method name."""


def method_name(method: str) -> str:
    """The last part of a full method name."""
    return method.rpartition("/")[2]
