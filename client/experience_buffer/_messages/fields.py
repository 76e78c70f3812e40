"""What a request's fields take, in the words of those who call the verbs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from experience_buffer import _arguments

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
    "flags": "flags as text, such as 'zero_variance'",
    "prefix": "what keys begin with, as text",
    "state": "states as text",
    "step": "a training step, a whole number",
    "tid": "a task's key as text, such as experience.eid.tid",
    "uid": f"a uid as {_UID}",
    "uids": f"uids, each as {_UID}",
    "version": "a policy version, a whole number of at least 0",
}
"""By field: what its type alone doesn't say."""
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31 - 1),
}
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
        field = message.DESCRIPTOR.fields_by_name[name]
        called = where + _ARGUMENTS.get(name, name)
        if field.message_type is not None:
            target = getattr(message, name)
            target.CopyFrom(value) if isinstance(target, Message) else target.extend(value)
        elif field.is_repeated:
            getattr(message, name).extend(plain(called, each, field) for each in value)
        else:
            setattr(message, name, plain(called, value, field))


def plain(name: str, value: Any, field: Any) -> Any:
    """What a field holds, of what the caller gave.

    Args:
        name: The argument.
        value: What was given.
        field: The field's descriptor; it holds no message.

    Raises:
        InvalidRequestError: The field can't hold it.
    """
    kind, given = field.cpp_type, type(value)
    if kind == FieldDescriptor.CPPTYPE_STRING and given is str and value.isascii():
        return value  # As most are: what to give instead needn't be said.
    if kind in _RANGES:
        least, most = _RANGES[kind]
        if given is int and least <= value <= most:
            return value
        return _arguments.as_whole(name, value, least=least, most=most, wanted=wanted(field))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return _arguments.as_text(name, value, wanted(field))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return _arguments.as_flag(name, value)
    return _arguments.as_number(name, value, wanted(field))
