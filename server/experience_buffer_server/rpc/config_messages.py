"""Between the contract's configuration of a buffer and the server's settings.

Both have the same fields under the same names; words of the settings are enums of the contract. So
the messages' own descriptors say how to translate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from experience_buffer import errors
from experience_buffer._messages.names import names_of
from experience_buffer.v1 import config_pb2, service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.settings_checks import (
    check_num_consumers,
    check_size,
    checked_settings,
)
from experience_buffer_server.settings.buffer import BufferSettings

_SHOWN_PATHS, _SHOWN_CHARS = 3, 60


def settings_from(config: config_pb2.BufferConfig) -> BufferSettings:
    """The settings that a configuration asks for; what isn't set takes its default.

    Raises:
        InvalidRequestError: A value is unknown or out of bounds; the message names the field.
    """
    return checked_settings(_values_from(config))


def changes_from(request: service_pb2.UpdateBufferRequest) -> dict[str, Any]:
    """The fields that an update names, with their new values; unset ones become the defaults.

    Raises:
        InvalidRequestError: The mask is empty or names what can't be changed.
    """
    known = set(BufferSettings.model_fields)
    # A mask may hold millions of paths: what is compared and repeated is what there can be of them.
    paths = request.update_mask.paths[: len(known) + 1]
    unknown = [path for path in paths if path not in known]
    if unknown or not paths or len(paths) > len(known):
        shown = [path[:_SHOWN_CHARS] for path in unknown[:_SHOWN_PATHS] or paths[:_SHOWN_PATHS]]
        raise errors.InvalidRequestError(
            f"update_mask {shown} must name at least one of {sorted(known)}, each once",
            subject="update_mask",
        )
    defaults = BufferSettings().model_dump()
    values = _values_from(request.config)
    return {path: values.get(path, defaults[path]) for path in paths}


def buffer_message(buffer: Buffer) -> config_pb2.Buffer:
    """A buffer as the server holds it."""
    settings = buffer.settings
    config = config_pb2.BufferConfig(name=buffer.name)
    _fill(config, settings.model_dump(exclude={"advantage"}))
    config.advantage.estimator = settings.advantage.estimator
    config.advantage.parameters.update(settings.advantage.parameters)
    return config_pb2.Buffer(
        config=config,
        policy_version=buffer.policy_version,
        create_time=buffer.create_time,
        num_items=buffer.num_items,
        num_bytes=buffer.num_bytes,
    )


def _values_from(config: config_pb2.BufferConfig) -> dict[str, Any]:
    # Before anything is made of it: an empty consumer takes two bytes.
    check_size(config.ByteSize())
    check_num_consumers(len(config.consumers))
    values = _read(config)
    del values["name"]
    if not values.get("consumers"):
        values.pop("consumers", None)
    if config.HasField("advantage"):
        parameters = config.advantage.parameters.fields
        values["advantage"] = {name: _parameter(name, value) for name, value in parameters.items()}
        values["advantage"]["estimator"] = config.advantage.estimator
    return values


def _read(message: Message) -> dict[str, Any]:
    """The fields that a message sets; those that can't be unset, always."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.full_name.startswith("google."):
            continue
        if field.is_repeated:
            values[field.name] = [_read(part) for part in value]
        elif field.has_presence and not message.HasField(field.name):
            continue
        elif field.message_type is not None:
            values[field.name] = _read(value)
        elif field.enum_type is None:
            values[field.name] = value
        elif value:
            # An unknown number stays visible in the error that follows.
            values[field.name] = names_of(field.enum_type).name(value, str(value))
    return values


def _fill(message: Message, values: Mapping[str, Any]) -> None:
    """Set a message's fields; None stays unset."""
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if value is None:
            continue
        if field.is_repeated:
            for part in value:
                _fill(getattr(message, name).add(), part)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), value)
        elif field.enum_type is not None:
            setattr(message, name, names_of(field.enum_type).by_name[value])
        else:
            setattr(message, name, value)


def _parameter(name: str, value: struct_pb2.Value) -> float | bool | str:
    kind = value.WhichOneof("kind")
    if kind not in ("number_value", "bool_value", "string_value"):
        raise errors.InvalidRequestError(
            f"advantage.parameters.{name}: a number, a boolean or a text is expected",
            subject=f"config.advantage.parameters.{name}",
        )
    parameter: float | bool | str = getattr(value, kind)
    return parameter
