"""Settings to messages and back, and what a message may not say."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.v1 import config_pb2, service_pb2
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.rpc import config_messages, messages
from experience_buffer_server.rpc.messages import MAX_DEPTH
from experience_buffer_server.settings.buffer import BufferSettings
from tests.unit.builders import World

FIELDS = config_pb2.BufferConfig.DESCRIPTOR.fields_by_name
FULL: dict[str, Any] = {
    "group_by": "run",
    "group_size": 3,
    "group_deadline_seconds": 5.5,
    "on_group_deadline": "use_partial",
    "min_group_size": 2,
    "late_members": "new_group",
    "on_bad_reward": "tombstone",
    "on_missing_field": "wait",
    "consumers": [
        {
            "name": "actor",
            "selector": {
                "kind": "max",
                "key": "reward",
                "exponent": 0.25,
                "decay": 0.75,
                "seed": 3,
            },
            "replay": True,
            "max_times_sampled": 5,
            "with_replacement": True,
            "limiter": {"min_size": 7, "samples_per_insert": 2.5, "min_diff": -11.5}
            | {"max_diff": 31.5, "max_ahead_bytes": 2**41},
            "staleness": {"max_lag": 2, "max_version_span": 3}
            | {"max_age_seconds": 19.5, "on_stale": "mark"},
            "max_deliveries": 13,
            "max_leased_experiences": 17,
            "max_leased_bytes": 2**42,
            "retain_steps": 23,
        },
        {"name": "critic", "unit": "group", "raw": True},
    ],
    "advantage": {"estimator": "gae", "gamma": 0.75, "lam": 0.5},
    "lease_seconds": 7.25,
    "max_items": 2**40 + 11,
    "max_bytes": 2**50 + 13,
    "duplicate_horizon_seconds": 17.5,
    "on_full": "block",
    "full_timeout_seconds": 31.5,
    "max_pending_bytes": 37,
    "retention": {"max_age_seconds": 41.5, "max_lag": 43},
    "remover": {"kind": "staleness", "decay": 0.125},
    "on_future_version": "refuse",
    "on_missing_version": "deliver",
    "pacing": {"consumer": "critic", "max_staleness": 2, "batch_size": 5, "max_running": 29},
    "archive": {"consumed": False, "dropped": False, "deleted": True, "refused": False}
    | {"max_age_seconds": 47.5, "max_bytes": 2**43, "max_pending_bytes": 2**41}
    | {"segment_seconds": 53.5},
}
ENUMS = [name for name, field in FIELDS.items() if field.enum_type is not None]


async def test_every_setting_survives_the_wire(world: World) -> None:
    assert set(FULL) == set(BufferSettings.model_fields)
    defaults = BufferSettings().model_dump()
    assert all(FULL[key] != defaults[key] for key in FULL)
    buffer = await world.create(**FULL)
    message = config_pb2.BufferConfig.FromString(
        config_messages.buffer_message(buffer).config.SerializeToString()
    )
    assert message.name == buffer.name
    assert config_messages.settings_from(message) == buffer.settings


def test_fields_that_are_not_set_take_the_defaults() -> None:
    assert config_messages.settings_from(config_pb2.BufferConfig(name="x")) == BufferSettings()
    unspecified = config_pb2.BufferConfig(group_by=config_pb2.GROUP_BY_UNSPECIFIED)
    assert config_messages.settings_from(unspecified) == BufferSettings()


@pytest.mark.parametrize("field", ENUMS)
def test_every_named_value_is_known_and_others_are_refused(field: str) -> None:
    enum_type = FIELDS[field].enum_type
    assert enum_type is not None
    values = enum_type.values_by_number
    for number in sorted(values)[1:]:
        config = config_pb2.BufferConfig(group_deadline_seconds=1.0)
        setattr(config, field, number)
        word = getattr(config_messages.settings_from(config), field)
        assert values[number].name.endswith(word.upper())
    config = config_pb2.BufferConfig()
    setattr(config, field, 41)
    with pytest.raises(errors.InvalidRequestError, match=rf"{field}: Input should be .*'41'"):
        config_messages.settings_from(config)


def test_an_unknown_unit_is_refused() -> None:
    config = config_pb2.BufferConfig(consumers=[{"name": "a", "unit": 43}])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidRequestError, match=r"consumers\.0\.unit: .*'43'"):
        config_messages.settings_from(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("duplicate_horizon_seconds", value) for value in (float("inf"), float("nan"), -1.0)),
        ("max_bytes", 2**64 - 1),
        ("max_items", 2**64 - 1),
    ],
)
def test_numbers_that_could_not_be_stored_are_refused(field: str, value: float) -> None:
    config = config_pb2.BufferConfig()
    setattr(config, field, value)
    with pytest.raises(errors.InvalidRequestError, match=field):
        config_messages.settings_from(config)


def test_an_update_names_its_fields() -> None:
    request = service_pb2.UpdateBufferRequest(config=config_pb2.BufferConfig(group_size=7))
    with pytest.raises(errors.InvalidRequestError, match="must name at least one of"):
        config_messages.changes_from(request)
    request.update_mask.paths.extend(["group_size", "lease_seconds"])
    assert config_messages.changes_from(request) == {"group_size": 7, "lease_seconds": 600.0}
    request.update_mask.paths.append("name")
    with pytest.raises(errors.InvalidRequestError, match="'name'"):
        config_messages.changes_from(request)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1.0]])
def test_parameters_that_are_no_parameters_are_named(value: Any) -> None:
    config = config_pb2.BufferConfig(advantage=config_pb2.AdvantageConfig(estimator="grpo"))
    config.advantage.parameters["eps"] = value
    with pytest.raises(errors.InvalidRequestError, match="eps"):
        config_messages.settings_from(config)


def test_an_annotation_s_entries_are_plain_data() -> None:
    message = service_pb2.Annotation(uid="u")
    info: dict[str, Any] = {"baseline_reward": 2, "num_turns": 3, "model_version": 1.5}
    info |= {"nested": {"list": [1, True, "x", None, {"deep": [[]]}]}}
    message.info.update(info)
    annotation = messages.annotation_from(message)
    assert (annotation.problem, annotation.info) == ("", info)
    assert type(annotation.info["num_turns"]) is int
    assert type(annotation.info["baseline_reward"]) is float


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_an_entry_that_is_not_finite_is_that_annotation_s_problem(number: str) -> None:
    message = service_pb2.Annotation(uid="u")
    message.info["baseline_reward"] = float(number)
    expected = f"info['baseline_reward'] is {number}; send a finite number"
    assert messages.annotation_from(message).problem == expected
    message.info.Clear()
    message.info["values"] = [0.5, {"a": float(number)}]
    expected = f"info['values'][1]['a'] is {number}; send a finite number"
    assert messages.annotation_from(message) == Annotation(uid="u", problem=expected)


def test_entries_are_nested_up_to_a_limit() -> None:
    def nested(depth: int) -> Annotation:
        data: Any = {}
        for level in range(depth - 1):
            data = {"d": data} if level % 2 else [data]
        message = service_pb2.Annotation(uid="u")
        message.info["d"] = data
        return messages.annotation_from(
            service_pb2.Annotation.FromString(message.SerializeToString())
        )

    assert nested(MAX_DEPTH - 1).problem == ""
    assert f"nested deeper than {MAX_DEPTH} levels; send flatter" in nested(MAX_DEPTH).problem
