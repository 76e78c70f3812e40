"""Buffer configurations to messages and back. Pure: no I/O, no gRPC, no rule of the server's."""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from experience_buffer._messages.convert import policy_version, struct_to_dict
from experience_buffer._messages.names import (
    CONFIG_ENUMS,
    SELECTOR_KEY,
    SELECTOR_KIND,
    STALE_POLICY,
    UNIT,
)
from experience_buffer.consumer_options import (
    ConsumerConfig,
    Limiter,
    Pacing,
    Selector,
    SelectorKind,
    Staleness,
)
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import AdvantageConfig, BufferConfig, Retention
from experience_buffer.v1 import config_pb2
from experience_buffer.values import BufferInfo

M = TypeVar("M", bound=Message)
_NUMBERS: Final = (
    "group_size",
    "group_deadline_seconds",
    "min_group_size",
    "lease_seconds",
    "max_items",
    "max_bytes",
    "duplicate_horizon_seconds",
    "full_timeout_seconds",
    "max_pending_bytes",
)
_MESSAGES: Final = ("consumers", "advantage", "remover", "pacing", "retention")
OPTIONAL: Final = ("pacing", "retention")
"""Those of which None is a value of its own when a configuration is changed."""
_CONSUMER: Final = (
    "name",
    "raw",
    "replay",
    "max_times_sampled",
    "with_replacement",
    "max_deliveries",
    "max_leased_experiences",
    "max_leased_bytes",
    "retain_steps",
)
_LIMITER: Final = ("min_size", "samples_per_insert", "min_diff", "max_diff", "max_ahead_bytes")
_WINDOW: Final = ("max_lag", "max_version_span", "max_age_seconds")
_PACING: Final = ("consumer", "max_staleness", "batch_size", "max_running")
_RETENTION: Final = ("max_age_seconds", "max_lag")
_SELECTOR: Final = ("exponent", "decay", "seed")


def config_to_message(config: BufferConfig) -> config_pb2.BufferConfig:
    """Translate a configuration; fields that are None stay unset.

    Raises:
        InvalidRequestError: A value has the wrong type, sign or name.
    """
    message = config_pb2.BufferConfig(name=config.name)
    for field, names in CONFIG_ENUMS.items():
        if (value := getattr(config, field)) is not None:
            setattr(message, field, names.number(value, field))
    _fill(message, config, _NUMBERS)
    for consumer in config.consumers or ():
        message.consumers.append(_consumer_to_message(consumer))
    if config.advantage is not None:
        message.advantage.CopyFrom(_advantage_to_message(config.advantage))
    if config.remover is not None:
        message.remover.CopyFrom(_selector_to_message(config.remover, "remover"))
    if config.pacing is not None:
        _fill(message.pacing, config.pacing, _PACING, "pacing.")
    if config.retention is not None:
        message.retention.SetInParent()
        _fill(message.retention, config.retention, _RETENTION, "retention.")
    return message


def config_from_message(message: config_pb2.BufferConfig) -> BufferConfig:
    """Translate a configuration; unset fields become None."""
    values: dict[str, Any] = {}
    for field, names in CONFIG_ENUMS.items():
        if message.HasField(cast(Any, field)):
            values[field] = names.name(getattr(message, field)) or None
    values |= _present(message, _NUMBERS)
    if message.consumers:
        values["consumers"] = tuple(map(_consumer_from_message, message.consumers))
    if message.HasField("advantage"):
        values["advantage"] = AdvantageConfig(
            message.advantage.estimator, struct_to_dict(message.advantage.parameters)
        )
    if message.HasField("remover"):
        values["remover"] = _selector_from_message(message.remover)
    if message.HasField("pacing"):
        values["pacing"] = Pacing(**{field: getattr(message.pacing, field) for field in _PACING})
    if message.HasField("retention"):
        values["retention"] = Retention(**_present(message.retention, _RETENTION))
    return BufferConfig(message.name, **values)


def buffer_info(message: config_pb2.Buffer) -> BufferInfo:
    """Translate a buffer."""
    return BufferInfo(
        config=config_from_message(message.config),
        policy_version=policy_version(message),
        create_time=message.create_time,
        num_items=message.num_items,
        num_bytes=message.num_bytes,
    )


def changed_fields(config: BufferConfig) -> list[str]:
    """The fields that are set, for an update mask."""
    fields = [*CONFIG_ENUMS, *_NUMBERS, *_MESSAGES]
    return [field for field in fields if getattr(config, field) is not None]


def _consumer_to_message(consumer: ConsumerConfig) -> config_pb2.ConsumerConfig:
    message = config_pb2.ConsumerConfig(unit=UNIT.number(consumer.unit, "consumers.unit"))
    _fill(message, consumer, _CONSUMER, "consumers.")
    message.selector.CopyFrom(_selector_to_message(consumer.selector, "consumers.selector"))
    if consumer.limiter is not None:
        _fill(message.limiter, consumer.limiter, _LIMITER, "consumers.limiter.")
    if consumer.staleness is not None:
        window = "consumers.staleness."
        message.staleness.on_stale = STALE_POLICY.number(
            consumer.staleness.on_stale, f"{window}on_stale"
        )
        _fill(message.staleness, consumer.staleness, _WINDOW, window)
    return message


def _consumer_from_message(message: config_pb2.ConsumerConfig) -> ConsumerConfig:
    values: dict[str, Any] = {field: getattr(message, field) for field in _CONSUMER}
    if message.HasField("selector"):
        values["selector"] = _selector_from_message(message.selector)
    if message.HasField("limiter"):
        values["limiter"] = Limiter(**_present(message.limiter, _LIMITER))
    if message.HasField("staleness"):
        values["staleness"] = Staleness(
            on_stale=STALE_POLICY.name(message.staleness.on_stale, "drop"),
            **_present(message.staleness, _WINDOW),
        )
    return ConsumerConfig(unit=UNIT.name(message.unit, "item"), **values)


def _selector_to_message(selector: Selector | SelectorKind, where: str) -> config_pb2.Selector:
    if isinstance(selector, str):
        selector = Selector(selector)
    if not isinstance(selector, Selector):
        raise InvalidRequestError(
            f"{where} is {selector!r:.200}; give a Selector or the name of its kind", subject=where
        )
    message = config_pb2.Selector(
        kind=SELECTOR_KIND.number(selector.kind, f"{where}.kind"),
        key=SELECTOR_KEY.number(selector.key, f"{where}.key"),
    )
    return _fill(message, selector, _SELECTOR, f"{where}.")


def _selector_from_message(message: config_pb2.Selector) -> Selector:
    return Selector(
        SELECTOR_KIND.name(message.kind, "fifo"),
        key=SELECTOR_KEY.name(message.key, "priority"),
        **_present(message, _SELECTOR),
    )


def _advantage_to_message(advantage: AdvantageConfig) -> config_pb2.AdvantageConfig:
    message = config_pb2.AdvantageConfig()
    field = "estimator"
    try:
        message.estimator = advantage.estimator
        field = "parameters"
        for name, value in dict(advantage.parameters).items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(f"{name} is a {type(value).__name__}")
            message.parameters[name] = value
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"advantage.{field} is {getattr(advantage, field)!r:.200}: {error}; give numbers, "
            "booleans and texts by name",
            subject=f"advantage.{field}",
        ) from None
    return message


def _fill(message: M, values: object, fields: tuple[str, ...], where: str = "") -> M:
    """Set the fields that aren't None.

    Raises:
        InvalidRequestError: A value has the wrong type or sign; it is named after `where`.
    """
    for field in fields:
        if (value := getattr(values, field)) is None:
            continue
        try:
            setattr(message, field, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{where}{field} is {value!r:.200}: {error}", subject=where + field
            ) from None
    return message


def _present(message: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are set, by name."""
    return {field: getattr(message, field) for field in fields if message.HasField(field)}
