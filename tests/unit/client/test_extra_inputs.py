"""Inputs of estimators that Trinity-RFT's class lacks: one thing as attribute and on the wire."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import trxp
from experience_buffer.eid import EID
from experience_buffer.experience import Experience


def experience(**arguments: Any) -> Experience:
    return Experience(
        eid=EID(3, 5, suffix="a"), tokens=[1, 2, 3, 5, 7], prompt_length=2, **arguments
    )


TENSORS: dict[str, list[Any]] = {
    "values": [0.5, 1, 2, 3],
    "ref_logprobs": [-1, -2, -3],
    "versions": [11, 13, -1],
}
NUMBERS: dict[str, Any] = {"baseline_reward": 0.25, "env_state_hash": "ab12", "num_turns": 2}


def test_lists_become_tensors_that_lie_in_extra() -> None:
    made = experience(**TENSORS)
    assert {name: tensor.dtype for name, tensor in made.extra.items()} == {
        "values": torch.float32,
        "ref_logprobs": torch.float32,
        "versions": torch.int64,
    }
    assert made.values is made.extra["values"]
    assert made.values is not None
    assert made.values.tolist() == TENSORS["values"]
    assert made.versions is made.extra["versions"]
    assert made.ref_logprobs is made.extra["ref_logprobs"]


def test_tensors_are_kept_and_arrays_keep_their_dtype() -> None:
    values = torch.zeros(3, dtype=torch.bfloat16)
    made = experience(values=values, ref_logprobs=np.zeros(3))
    assert made.values is values
    assert made.ref_logprobs is not None
    assert made.ref_logprobs.dtype == torch.float64


def test_numbers_lie_in_info() -> None:
    made = experience(info={"model_version": 3}, **NUMBERS)
    assert made.info == {"model_version": 3, **NUMBERS}
    assert (made.baseline_reward, made.env_state_hash, made.num_turns) == (0.25, "ab12", 2)
    assert experience(baseline_reward=torch.tensor(0.5)).info == {"baseline_reward": 0.5}


def test_nothing_given_is_nothing_sent() -> None:
    made = experience()
    assert (made.extra, made.info) == ({}, {})
    for name in (*TENSORS, *NUMBERS):
        assert getattr(made, name) is None


def test_assignment_is_seen_both_ways_and_none_removes() -> None:
    made = experience()
    made.values = [1.0, 2.0, 3.0]
    assert made.extra["values"].dtype == torch.float32
    made.extra["values"] = torch.zeros(4)
    assert made.values is made.extra["values"]
    made.num_turns = 3
    assert made.info["num_turns"] == 3
    made.info["num_turns"] = 5
    assert made.num_turns == 5
    made.values = made.num_turns = made.env_state_hash = made.versions = None
    assert (made.extra, made.info) == ({}, {})


def test_an_info_that_is_shared_is_left_alone() -> None:
    shared = {"task": "t"}
    first, second = experience(info=shared), experience(info=shared, baseline_reward=0.5)
    first.env_state_hash = "a"
    second.env_state_hash = "b"
    assert (first.env_state_hash, second.env_state_hash) == ("a", "b")
    assert shared == {"task": "t"}
    assert experience(info=shared).info is shared


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"values": [1.0], "extra": {"values": torch.ones(1)}}, "values .* twice"),
        ({"num_turns": 2, "info": {"num_turns": 3}}, "num_turns .* twice"),
    ],
)
def test_one_input_given_twice_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        experience(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("env_state_hash", 17),
        ("env_state_hash", b"ab"),
        ("num_turns", 2.0),
        ("baseline_reward", "0.5"),
        ("baseline_reward", [0.5]),
        ("baseline_reward", torch.ones(2)),
    ],
)
def test_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is .*; give"):
        experience(**{name: value})


def test_they_travel_in_the_payload_and_come_back() -> None:
    extra = {"action_entropy": torch.rand(3)}
    made = experience(extra=extra, **TENSORS, **NUMBERS)
    item, *_ = trxp.read(made.serialize())
    assert isinstance(item, trxp.Item)
    assert set(item.tensors) == {"tokens", "action_mask", "action_entropy", *TENSORS}
    assert item.meta["info"] == NUMBERS
    for back in (Experience.deserialize(made.serialize()), pickle.loads(pickle.dumps(made))):
        for name, numbers in TENSORS.items():
            assert getattr(back, name).tolist() == numbers
        for name, value in NUMBERS.items():
            assert getattr(back, name) == value
        assert list(back.extra["action_entropy"]) == list(extra["action_entropy"])
        assert back.serialize() == made.serialize()


def test_the_arguments_give_the_bytes_that_extra_and_info_give() -> None:
    extra = {
        name: torch.tensor(numbers, dtype=torch.int64 if name == "versions" else torch.float32)
        for name, numbers in TENSORS.items()
    }
    assert (
        experience(**TENSORS, **NUMBERS).serialize()
        == experience(extra=extra, info=dict(NUMBERS)).serialize()
    )
