"""Requests from what callers give: a wrong value is an error of this package, and named. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from experience_buffer.errors import InvalidRequestError

M = TypeVar("M", bound=Message)


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
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{field} is {value!r}: {error}", subject=field) from None
    return request
