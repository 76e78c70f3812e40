"""Unary calls: their requests, how to read their responses, whether repeating them is safe.

Both clients run the same `Call`s; they differ only in how they wait. Here are those about stored
experiences and their groups; the others are in `delivery_calls.py` and `buffer_calls.py`. Pure:
no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from experience_buffer._messages import convert
from experience_buffer._messages.build import build
from experience_buffer._messages.names import STATE
from experience_buffer.errors import InvalidRequestError
from experience_buffer.outcomes import AnnotateOutcome
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.values import (
    DeleteResult,
    ExperienceState,
    ExperienceSummary,
    SealedGroup,
    StoredExperience,
)

T = TypeVar("T")
NOTHING_DELETED: Final = DeleteResult(num_deleted=0, leased_uids=(), unknown_uids=())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary call."""

    method: str
    request: Message | bytes
    parse: Callable[[Any], T]
    idempotent: bool = True
    """Doing it twice is as good as doing it once."""


def push(request: bytes) -> Call[pb.PushResponse]:
    """Store one request's share of a push; see `push_bytes.push_request`."""
    return Call("Push", request, lambda response: response)


def seal_group(group: str, *, buffer: str, group_size: int) -> Call[SealedGroup]:
    """Close a group."""
    request = build(pb.SealGroupRequest, buffer=buffer, group=group, group_size=group_size)
    return Call("SealGroup", request, convert.reader_of(SealedGroup))


def drop_group(group: str, *, buffer: str, reason: str) -> Call[int]:
    """Discard a group."""
    request = build(pb.DropGroupRequest, buffer=buffer, group=group, reason=reason)
    return Call("DropGroup", request, lambda response: response.num_dropped)


def get(uid: str, *, buffer: str) -> Call[StoredExperience]:
    """Read one experience."""
    request = build(pb.GetRequest, buffer=buffer, uid=uid)
    return Call("Get", request, convert.stored)


def annotate(request: pb.AnnotateRequest) -> Call[tuple[AnnotateOutcome, ...]]:
    """Add fields to experiences."""
    return Call(
        "Annotate",
        request,
        lambda response: tuple(map(convert.annotate_outcome, response.outcomes)),
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
            tuple(convert.summary(item) for item in response.experiences),
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
        where.state = STATE.number(state, "state")
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
    return Call("Delete", request, convert.reader_of(DeleteResult), idempotent=False)
