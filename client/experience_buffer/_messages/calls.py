"""Unary calls: a request, how to read its response, whether repeating it is safe. Pure: no I/O.

Most verbs say theirs in a line, by `call_of`. Here and in `delivery_calls.py` are the parts of those
that have more to check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from experience_buffer._messages import convert, fields
from experience_buffer.errors import InvalidRequestError
from experience_buffer.v1 import looking_pb2
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.values import DeleteResult

T = TypeVar("T")
M = TypeVar("M", bound=Message)
NOTHING_DELETED: Final = DeleteResult(num_deleted=0, leased_uids=(), unknown_uids=())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary call."""

    method: str
    request: Message | bytes
    parse: Callable[[Any], T]
    idempotent: bool = True
    """Doing it twice is as good as doing it once."""


def build(message: type[M], **values: Any) -> M:
    """Make a request.

    Raises:
        InvalidRequestError: A value has the wrong type or sign.
    """
    request = message()
    fields.fill(request, values)
    return request


def call_of(
    method: str, parse: Callable[[Any], T], *, idempotent: bool = True, **values: Any
) -> Call[T]:
    """The call of a method whose request has these fields.

    Raises:
        InvalidRequestError: A value has the wrong type or sign.
    """
    name = f"{method}Request"
    kind = getattr(pb, name, None) or getattr(looking_pb2, name)
    return Call(method, build(kind, **values), parse, idempotent)


def number(field: str) -> Callable[[Any], int]:
    """What reads a response of which one number counts."""
    return attrgetter(field)


def delete(
    uids: str | Sequence[str] | None, *, buffer: str, where: pb.Filter
) -> Call[DeleteResult] | None:
    """Remove experiences; None when an empty sequence of uids asks for nothing.

    Raises:
        InvalidRequestError: Both uids and a filter, or neither, are given.
    """
    if uids is not None and where != pb.Filter():
        raise InvalidRequestError(
            "delete takes uids, or what names them, such as tid or state; give one of the two",
            subject="uids",
        )
    if uids is None and where == pb.Filter():
        raise InvalidRequestError(
            "delete needs uids, or at least one of what names them, such as tid or state",
            subject="uids",
        )
    names = [] if uids is None else fields.texts("uids", uids)
    if uids is not None and not names:
        return None
    parse = convert.reader_of(DeleteResult)
    return call_of("Delete", parse, idempotent=False, buffer=buffer, uids=names, filter=where)
