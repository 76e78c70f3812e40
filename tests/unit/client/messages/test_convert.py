"""What the server says of computations, statistics and experiences, as the caller gets it."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer._messages import convert
from experience_buffer.v1 import service_pb2, types_pb2

COUNTS = ["members", "votes", "batch_groups", "batch_members", "running_count"]


def computation(entries: dict[str, Any]) -> dict[str, Any]:
    message = service_pb2.GetResponse()
    message.computation.update(entries)
    found = convert.stored(service_pb2.GetResponse.FromString(message.SerializeToString()))
    assert found.computation is not None
    return found.computation


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_whole_numbers_and_nothing_else_is_changed(name: str) -> None:
    found = computation({name: 2**40 + 1, "mean": 2, "std": 0.5, "singleton": False, "x": "y"})
    assert found == {name: 2**40 + 1, "mean": 2.0, "std": 0.5, "singleton": False, "x": "y"}
    kinds = {key: type(value) for key, value in found.items()}
    assert kinds == {name: int, "mean": float, "std": float, "singleton": bool, "x": str}


@pytest.mark.parametrize("value", [0.5, float("inf"), float("-inf"), "many", True, [1.0]])
def test_a_count_that_is_none_stays_what_it_is(value: Any) -> None:
    found = computation({"votes": value})
    assert found == {"votes": value}
    assert type(found["votes"]) is type(value)


def filled(message: Any) -> dict[str, Any]:
    """Give every plain field of a message a value of its own; these, by name."""
    values: dict[str, Any] = {}
    for place, field in enumerate(message.DESCRIPTOR.fields):
        if field.message_type is None and field.enum_type is None:
            text = field.cpp_type == field.CPPTYPE_STRING
            values[field.name] = f"text {place}" if text else 101 + place
            setattr(message, field.name, values[field.name])
    return values


def test_every_field_of_statistics_arrives_under_its_name() -> None:
    response = service_pb2.GetStatsResponse()
    buffer = response.buffers.add()
    consumer = buffer.consumers.add()
    in_buffer, in_consumer = filled(buffer), filled(consumer)
    [found] = convert.stats(response).buffers
    assert {name: getattr(found, name) for name in in_buffer} == in_buffer
    assert {name: getattr(found.consumers[0], name) for name in in_consumer} == in_consumer
    bare = convert.stats(
        service_pb2.GetStatsResponse(
            buffers=[service_pb2.BufferStats(consumers=[service_pb2.ConsumerStats()])]
        )
    ).buffers[0]
    assert (bare.policy_version, bare.consumers[0].last_step) == (None, None)
    assert (bare.keep_ratio, bare.consumers[0].safe_step) == (None, None)


def test_every_field_of_a_summary_arrives_under_its_name() -> None:
    message = types_pb2.ExperienceSummary(state=types_pb2.EXPERIENCE_STATE_RETAINED)
    given = filled(message)
    found = convert.summary(message)
    assert {name: getattr(found, name) for name in given} == given
    assert found.state == "retained"
