"""Names and settings of buffers as callers give them: what is refused, and with which words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from experience_buffer import errors
from experience_buffer_server.settings.buffer import MAX_CONSUMERS, BufferSettings
from experience_buffer_server.settings.consumer import NAME_WORDS, Name
from experience_buffer_server.settings.server import explain

if TYPE_CHECKING:
    from experience_buffer_server.buffer.buffer import Buffer

_SHOWN_CHARS = 80
_SHOWN_CONTRASTS = 3
_NAME: TypeAdapter[str] = TypeAdapter(Name)
MAX_CONFIG_BYTES = 256 * 1024
"""Of one buffer's settings: an operator's estimator may have parameters of any length."""


def check_name(name: str) -> None:
    """Refuse what no buffer can be called.

    Raises:
        InvalidRequestError: The name isn't one.
    """
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise errors.InvalidRequestError(
            f"buffer name {name[:_SHOWN_CHARS]!r}: give {NAME_WORDS}",
            subject="config.name",
        ) from error


def checked_settings(values: Mapping[str, object]) -> BufferSettings:
    """Settings from plain values.

    Raises:
        InvalidRequestError: A key is unknown or out of bounds, or nothing could ever come of them
            together; the message names it.
    """
    try:
        settings = BufferSettings.model_validate(values)
    except ValidationError as error:
        raise errors.InvalidRequestError(
            explain(error, of=BufferSettings), subject="config"
        ) from error
    if problem := settings.impossible():
        raise errors.InvalidRequestError(problem, subject="config")
    check_size(len(settings.model_dump_json()))
    return settings


def check_size(num_bytes: int) -> None:
    """Refuse settings that are too long, on the wire or as JSON.

    Raises:
        InvalidRequestError: More than `MAX_CONFIG_BYTES`.
    """
    if num_bytes > MAX_CONFIG_BYTES:
        raise errors.InvalidRequestError(
            f"a configuration of {num_bytes} bytes is over the limit of {MAX_CONFIG_BYTES}; "
            "shorten the texts in it",
            subject="config",
        )


def check_num_consumers(num_consumers: int) -> None:
    """Refuse more consumers than a buffer may have.

    Raises:
        InvalidRequestError: More than `MAX_CONSUMERS`.
    """
    if num_consumers > MAX_CONSUMERS:
        raise errors.InvalidRequestError(
            f"consumers: {num_consumers} are over the limit of {MAX_CONSUMERS}",
            subject="config.consumers",
        )


def changed_settings(buffer: Buffer, changes: Mapping[str, object]) -> BufferSettings:
    """The settings of a buffer after a change.

    Raises:
        InvalidRequestError: They don't fit together.
        WrongStateError: The grouping changes while experiences are stored.
    """
    old = buffer.settings
    new = checked_settings(old.model_dump() | dict(changes))
    if new.group_by != old.group_by and (buffer.state.contents or buffer.state.contents.groups):
        raise errors.WrongStateError(
            f"buffer {buffer.name!r} holds {len(buffer.state.contents)} experiences grouped by "
            f"{old.group_by}; group_by can change only while it is empty",
            subject=buffer.name,
        )
    return new


def differences(stored: BufferSettings, given: BufferSettings) -> dict[str, Any]:
    """The keys that a configuration gives and that a stored buffer has otherwise, with their values.

    Keys that the configuration doesn't give are left as they are stored; a table or list that it
    gives, such as `consumers`, counts as a whole.
    """
    has, wants = stored.model_dump(), given.model_dump()
    return {key: wants[key] for key in sorted(given.model_fields_set) if wants[key] != has[key]}


def contrast(stored: BufferSettings, wanted: BufferSettings) -> str:
    """Say in words which settings are others; the first few of them."""
    found = list(_contrasts(stored.model_dump(), wanted.model_dump(), where=""))
    more = f" and {len(found) - _SHOWN_CONTRASTS} more" if len(found) > _SHOWN_CONTRASTS else ""
    return ", ".join(found[:_SHOWN_CONTRASTS]) + more


def _contrasts(has: Any, wants: Any, *, where: str) -> Iterator[str]:
    """Each value within `wants` that isn't the one in its place within `has`."""
    if isinstance(has, dict) and isinstance(wants, dict) and has.keys() == wants.keys():
        for key in has:
            yield from _contrasts(has[key], wants[key], where=f"{where}.{key}".lstrip("."))
    elif isinstance(has, (list, tuple)) and len(has) == len(wants or ()):
        for index, (one, other) in enumerate(zip(has, wants, strict=True)):
            yield from _contrasts(one, other, where=f"{where}[{index}]")
    elif has != wants:
        yield f"{where} is {_shown(has)}, not {_shown(wants)}"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        return f"{[each.get('name') for each in value]}"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
