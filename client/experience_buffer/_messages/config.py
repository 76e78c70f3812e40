"""Buffer configurations to messages; back it goes as all values do. Pure: no I/O, no rule of the server's.

Values and messages have the same fields under the same names, and words of the values are enums of the
contract: so the messages' own descriptors say how to translate.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from experience_buffer._arguments import as_number, as_text, misspelt, pairs, shown
from experience_buffer._messages.fields import plain
from experience_buffer._messages.names import names_of
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import AdvantageConfig, BufferChanges, BufferConfig
from experience_buffer.v1 import config_pb2, service_pb2

_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BufferConfig)[1:])
OPTIONAL: Final = ("archive", "pacing", "retention")
"""Those of which None is a value of its own when a configuration is changed."""


def config_to_message(config: BufferConfig) -> config_pb2.BufferConfig:
    """Translate a configuration; fields that are None stay unset.

    Raises:
        InvalidRequestError: A value has the wrong type, sign or name.
    """
    message = config_pb2.BufferConfig()
    _fill(message, config)
    return message


def update_request(name: str, changes: BufferChanges) -> service_pb2.UpdateBufferRequest:
    """Ask for the change of the fields that are given.

    Raises:
        InvalidRequestError: None is given, or a value is malformed.
    """
    for field in changes:
        if field not in _FIELDS:
            raise InvalidRequestError(
                f"update_buffer has no field {field!r}; {misspelt(field, _FIELDS)}", subject=field
            )
    config = BufferConfig(name, **changes)
    paths = changed_fields(config)
    paths += [name for name in OPTIONAL if name in changes and name not in paths]
    if not paths:
        given = "".join(f", {field} is None" for field in changes)
        raise InvalidRequestError(f"update_buffer changes nothing{given}: give at least one field")
    return service_pb2.UpdateBufferRequest(
        config=config_to_message(config), update_mask=FieldMask(paths=paths)
    )


def changed_fields(config: BufferConfig) -> list[str]:
    """The fields that are set, for an update mask."""
    names = (field.name for field in dataclasses.fields(config) if field.name != "name")
    return [name for name in names if getattr(config, name) is not None]


def _fill(message: Message, values: object, where: str = "") -> None:
    """Set the fields that aren't None.

    Raises:
        InvalidRequestError: A value has the wrong type, sign or name; it is named after `where`.
    """
    for field in message.DESCRIPTOR.fields:
        name, place = field.name, where + field.name
        value = getattr(values, name)
        if value is None:
            continue
        if field.enum_type is not None:
            setattr(message, name, names_of(field.enum_type).number(value, place))
        elif field.message_type is None:
            setattr(message, name, plain(place, value, field))
        else:
            _fill_part(getattr(message, name), value, place)


def _fill_part(target: Any, value: Any, where: str) -> None:
    """Set a message within one, or several of a kind."""
    if isinstance(value, AdvantageConfig):
        _fill_advantage(target, value)
    elif isinstance(target, Message):
        target.SetInParent()
        _fill(target, value, f"{where}.")
    else:
        for index, part in enumerate(value):
            _fill(target.add(), part, f"{where}[{index}].")


def _fill_advantage(message: config_pb2.AdvantageConfig, advantage: AdvantageConfig) -> None:
    wanted = 'an estimator\'s name as text, such as "grpo"'
    message.estimator = as_text("advantage.estimator", advantage.estimator, wanted)
    where = "advantage.parameters"
    for key, value in pairs(where, advantage.parameters, "a dict of values by name"):
        name = as_text(f"advantage.{shown(key)}", key, "the parameter's name as text")
        if isinstance(value, str):
            message.parameters[name] = as_text(f"advantage.{name}", value)
        elif isinstance(value, bool):
            message.parameters[name] = value
        else:
            wanted = "a number, True, False or text"
            message.parameters[name] = as_number(f"advantage.{name}", value, wanted)
