"""What the server says of computations, statistics and experiences, as the caller gets it."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import BufferConfig, ConsumerConfig, ExperienceSummary
from experience_buffer._messages import convert
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2

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


def test_a_word_that_only_a_newer_server_knows_is_the_default_or_the_first() -> None:
    summary = types_pb2.ExperienceSummary(uid="u", state=77)  # type: ignore[arg-type]
    assert convert.value_of(ExperienceSummary, summary).state == "waiting_for_group"
    config = config_pb2.BufferConfig(name="math", on_full=77)  # type: ignore[arg-type]
    config.consumers.add(name="a", unit=77)
    expected = BufferConfig("math", consumers=(ConsumerConfig("a"),))
    assert convert.value_of(BufferConfig, config) == expected
