"""Every unary call: its request, how to read its response, whether repeating it is safe.

Both clients run the same `Call`s; they differ only in how they wait. Pure: no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from experience_buffer import _convert
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import BufferConfig
from experience_buffer.outcomes import AnnotateOutcome
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.values import (
    BufferInfo,
    DeleteResult,
    ExperienceState,
    ExperienceSummary,
    SealedGroup,
    Stats,
    StoredExperience,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)
NOTHING_DELETED: Final = DeleteResult(num_deleted=0, leased_uids=(), unknown_uids=())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary call."""

    method: str
    request: Message
    parse: Callable[[Any], T]
    idempotent: bool = True
    """Doing it twice is as good as doing it once."""


def build(message: type[M], **fields: Any) -> M:
    """Make a request.

    Raises:
        InvalidRequestError: A value has the wrong type or sign.
    """
    request = message()
    for field, value in fields.items():
        try:
            target = getattr(request, field)
            if isinstance(target, Message):
                target.CopyFrom(value)
            elif isinstance(value, (list, tuple)):
                target.extend(value)
            else:
                setattr(request, field, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{field} is {value!r}: {error}", subject=field) from None
    return request


def push(request: pb.PushRequest) -> Call[pb.PushResponse]:
    """Store one request's share of a push."""
    return Call("Push", request, lambda response: response)


def seal_group(group: str, *, buffer: str, group_size: int) -> Call[SealedGroup]:
    """Close a group."""
    request = build(pb.SealGroupRequest, buffer=buffer, group=group, group_size=group_size)
    return Call(
        "SealGroup",
        request,
        lambda response: SealedGroup(
            num_members=response.num_members, group_size=response.group_size
        ),
    )


def drop_group(group: str, *, buffer: str, reason: str) -> Call[int]:
    """Discard a group."""
    request = build(pb.DropGroupRequest, buffer=buffer, group=group, reason=reason)
    return Call("DropGroup", request, lambda response: response.num_dropped)


def sample(
    batch_size: int,
    *,
    buffer: str,
    consumer: str,
    wait_seconds: float,
    min_batch_size: int,
    lease_seconds: float,
) -> Call[dict[str, Any]]:
    """Lease one batch; the result is the fields of a batch.

    Safe to repeat: a batch whose response was lost is offered again when its lease expires.
    """
    request = build(
        pb.SampleRequest,
        buffer=buffer,
        consumer=consumer,
        batch_size=batch_size,
        min_batch_size=min_batch_size,
        timeout_seconds=wait_seconds,
        lease_seconds=lease_seconds,
    )

    def parse(response: pb.SampleResponse) -> dict[str, Any]:
        lease = response.lease if response.HasField("lease") else None
        fields = _convert.batch_fields(
            response.experiences, lease, response, received_time=time.monotonic()
        )
        return {"buffer": buffer, "consumer": consumer, **fields}

    return Call("Sample", request, parse)


def ack(lease_id: int, *, buffer: str) -> Call[int]:
    """End a lease successfully."""
    request = build(pb.AckRequest, buffer=buffer, lease_id=lease_id)
    return Call("Ack", request, lambda response: response.num_experiences)


def nack(lease_id: int, *, buffer: str, reason: str) -> Call[int]:
    """Give a lease back."""
    request = build(pb.NackRequest, buffer=buffer, lease_id=lease_id, reason=reason)
    return Call("Nack", request, lambda response: response.num_experiences)


def get(uid: str, *, buffer: str) -> Call[StoredExperience]:
    """Read one experience."""
    request = build(pb.GetRequest, buffer=buffer, uid=uid)
    return Call("Get", request, _convert.stored)


def annotate(request: pb.AnnotateRequest) -> Call[tuple[AnnotateOutcome, ...]]:
    """Add fields to experiences."""
    return Call(
        "Annotate",
        request,
        lambda response: tuple(map(_convert.annotate_outcome, response.outcomes)),
    )


def list_page(
    page_token: str, *, buffer: str, where: pb.Filter, page_size: int
) -> Call[tuple[tuple[ExperienceSummary, ...], str]]:
    """Read one page of summaries; with the next page's token, empty after the last."""
    request = build(
        pb.ListRequest, buffer=buffer, filter=where, page_size=page_size, page_token=page_token
    )
    return Call(
        "List",
        request,
        lambda response: (
            tuple(_convert.summary(item) for item in response.experiences),
            response.next_page_token,
        ),
    )


def make_filter(*, tid: str, rid: str, sid: str, state: ExperienceState | None) -> pb.Filter:
    """Make a filter; what is empty or None matches all.

    Raises:
        InvalidRequestError: No such state.
    """
    where = build(pb.Filter, tid=tid, rid=rid, sid=sid)
    if state is not None:
        where.state = _convert.STATE.number(state, "state")
    return where


def delete(
    uids: str | Sequence[str] | None, *, buffer: str, where: pb.Filter
) -> Call[DeleteResult] | None:
    """Remove experiences; None when an empty sequence of uids asks for nothing.

    Raises:
        InvalidRequestError: Both uids and a filter, or neither, are given.
    """
    if uids is not None and where != pb.Filter():
        raise InvalidRequestError("give uids or a filter, not both", subject="uids")
    if uids is None and where == pb.Filter():
        raise InvalidRequestError(
            "give uids, or at least one of tid, rid, sid and state", subject="uids"
        )
    names = [uids] if isinstance(uids, str) else list(uids or ())
    if uids is not None and not names:
        return None
    request = build(pb.DeleteRequest, buffer=buffer, uids=names, filter=where)
    return Call(
        "Delete",
        request,
        lambda response: DeleteResult(
            num_deleted=response.num_deleted,
            leased_uids=tuple(response.leased_uids),
            unknown_uids=tuple(response.unknown_uids),
        ),
        idempotent=False,
    )


def create_buffer(config: BufferConfig | str, *, exist_ok: bool) -> Call[BufferInfo]:
    """Create a buffer, by configuration or just by name."""
    if isinstance(config, str):
        config = BufferConfig(config)
    request = build(
        pb.CreateBufferRequest, config=_convert.config_to_message(config), exist_ok=exist_ok
    )
    return Call("CreateBuffer", request, _buffer_of, idempotent=exist_ok)


def update_buffer(config: BufferConfig) -> Call[BufferInfo]:
    """Change the fields of a configuration that are set.

    Raises:
        InvalidRequestError: None is set, or a value is malformed.
    """
    paths = _convert.changed_fields(config)
    if not paths:
        raise InvalidRequestError("update_buffer changes nothing: give at least one field")
    request = build(
        pb.UpdateBufferRequest,
        config=_convert.config_to_message(config),
        update_mask=FieldMask(paths=paths),
    )
    return Call("UpdateBuffer", request, _buffer_of)


def get_buffer(name: str) -> Call[BufferInfo]:
    """Read one buffer."""
    return Call("GetBuffer", build(pb.GetBufferRequest, name=name), _buffer_of)


def list_buffers() -> Call[tuple[BufferInfo, ...]]:
    """Read all buffers."""
    return Call(
        "ListBuffers",
        pb.ListBuffersRequest(),
        lambda response: tuple(_convert.buffer_info(buffer) for buffer in response.buffers),
    )


def delete_buffer(name: str, *, force: bool) -> Call[int]:
    """Remove a buffer."""
    request = build(pb.DeleteBufferRequest, name=name, force=force)
    return Call("DeleteBuffer", request, lambda response: response.num_items, idempotent=False)


def publish_policy_version(version: int, *, buffer: str) -> Call[int | None]:
    """Publish a policy version; the result is the one before."""
    request = build(pb.PublishPolicyVersionRequest, buffer=buffer, version=version)
    return Call(
        "PublishPolicyVersion",
        request,
        lambda response: (
            response.previous_version if response.HasField("previous_version") else None
        ),
    )


def get_stats(buffer: str) -> Call[Stats]:
    """Read statistics."""
    return Call("GetStats", build(pb.GetStatsRequest, buffer=buffer), _convert.stats)


def _buffer_of(response: Any) -> BufferInfo:
    return _convert.buffer_info(response.buffer)
