"""What a request's fields take, in the words of those who call the verbs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import Message

from experience_buffer import _arguments
from experience_buffer._arguments import refused, shown
from experience_buffer.errors import InvalidRequestError

_ARGUMENTS: Final = {
    "timeout_seconds": "timeout",
    "read_ahead": "prefetch",
    "credits": "prefetch",
    "byte_credits": "max_bytes",
}
"""What the verbs call those fields that the contract calls otherwise."""
_VERBS: Final = {"PushStream": "writer", "SampleStream": "stream"}
_KEY: Final = 'text, "batch/task" in a buffer grouped by task: such as experience.eid.tid'
_UID: Final = "text, such as experience.eid.uid"
_WANTED: Final = {
    "batch_size": "how many units, a whole number, at least 1 and below 2**32",
    "buffer": "a buffer's name as text",
    "consumer": "a consumer's name as text",
    "format": "'trxp' or 'packed'",
    "group": f"a group's key as {_KEY}",
    "groups": f"groups' keys, each as {_KEY}",
    "label": "text",
    "lease_id": "a lease's number, such as batch.lease_id",
    "name": "a name as text",
    "rid": "a run's key as text, such as experience.eid.rid",
    "sid": "a step's key as text, such as experience.eid.sid",
    "step": "a training step, a whole number",
    "tid": "a task's key as text, such as experience.eid.tid",
    "uid": f"a uid as {_UID}",
    "uids": f"uids, each as {_UID}",
    "version": "a policy version, a whole number of at least 0",
}
"""By field: what its type alone doesn't say."""
_BITS: Final = {"INT32": 31, "INT64": 63, "UINT32": 32, "UINT64": 64}


def verb(method: str) -> str:
    """What calls a method, in the client's words: "publish_policy_version"."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
    return _VERBS.get(method, words)


def wanted(field: Any) -> str:
    """What a field takes.

    Args:
        field: Its descriptor.
    """
    if field.name in _WANTED:
        return _WANTED[field.name]
    kind = next(name[5:] for name in _TYPES if getattr(field, name) == field.type)
    if kind in _BITS:
        least = "0" if kind.startswith("U") else f"-2**{_BITS[kind]}"
        return f"a whole number, at least {least} and below 2**{_BITS[kind]}"
    return {"BOOL": "True or False", "STRING": "text"}.get(kind, "a number")


_TYPES: Final = tuple(
    f"TYPE_{kind}" for kind in (*_BITS, "BOOL", "STRING", "DOUBLE", "FLOAT", "BYTES", "MESSAGE")
)


def texts(name: str, value: Any) -> list[str]:
    """One text or several, as a list.

    Raises:
        InvalidRequestError: It is neither; the error names the entry.
    """
    return _arguments.texts(name, value, _WANTED[name])


def fill(message: Message, values: Mapping[str, Any], where: str = "") -> None:
    """Set fields of a message.

    Args:
        message: The message.
        values: By field.
        where: What the caller calls the message, such as "config."; empty: the arguments are its
            fields.

    Raises:
        InvalidRequestError: A value has the wrong type or is out of range.
    """
    for name, value in values.items():
        try:
            target = getattr(message, name)
            if isinstance(target, Message):
                target.CopyFrom(value)
            elif isinstance(value, (list, tuple)):
                target.extend(value)
            else:
                setattr(message, name, value)
        except (AttributeError, TypeError, ValueError):
            field = message.DESCRIPTOR.fields_by_name[name]
            raise unfit(where + _ARGUMENTS.get(name, name), value, field) from None


def unfit(name: str, value: Any, field: Any) -> InvalidRequestError:
    """Make the error of a value that a field can't hold.

    Args:
        name: The argument.
        value: What was given.
        field: The field's descriptor.
    """
    if _is_half_pair(value):
        return InvalidRequestError(
            f"{name} is {shown(value)}, which has half of a surrogate pair; give text that UTF-8 "
            "can hold",
            subject=name,
        )
    return refused(name, value, wanted(field))


def _is_half_pair(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_half_pair, value))
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)
