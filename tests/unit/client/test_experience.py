from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import trxp
from experience_buffer.eid import EID
from experience_buffer.errors import InvalidRequestError, TrxpError
from experience_buffer.experience import Experience


def test_lists_become_tensors_of_the_documented_dtypes() -> None:
    experience = Experience(
        tokens=[1, 2, 3],
        logprobs=[0, -1],
        token_level_reward=[0, 1],
        advantages=[1, 2],
        returns=[1, 2],
        action_mask=[1, 0],
        chosen=[1],
        rejected=[2],
        teacher_logprobs=[0, 0],
        routed_experts=[[[1]], [[2]]],
        multi_modal_inputs={"a": [1.5]},
    )
    dtypes = {
        name: value.dtype
        for name in vars(experience)
        if torch.is_tensor(value := getattr(experience, name))
    }
    assert dtypes == {
        "tokens": torch.int32,
        "logprobs": torch.float32,
        "token_level_reward": torch.float32,
        "advantages": torch.float32,
        "returns": torch.float32,
        "action_mask": torch.bool,
        "chosen": torch.int32,
        "rejected": torch.int32,
        "teacher_logprobs": torch.float32,
        "routed_experts": torch.uint8,
    }
    assert experience.multi_modal_inputs is not None
    assert experience.multi_modal_inputs["a"].dtype == torch.float32


def test_tensors_are_kept_and_arrays_keep_their_dtype() -> None:
    tokens, values = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.bfloat16)
    arrays: dict[str, Any] = dict.fromkeys(("logprobs", "ref_logprobs"), np.array([0.5, 0.25]))
    experience = Experience(tokens=tokens, prompt_length=1, values=values, **arrays)
    assert experience.tokens is tokens
    assert experience.values is values
    for name in arrays:
        assert getattr(experience, name).dtype == torch.float64


def test_single_turn_gets_a_mask_of_ones() -> None:
    experience = Experience(tokens=[1, 2, 3, 4, 5], prompt_length=3)
    assert experience.experience_type == "single_turn"
    assert experience.action_mask is not None
    assert experience.action_mask.tolist() == [True, True]


def test_truncated_prompt_gets_a_mask_of_zeros() -> None:
    experience = Experience(
        tokens=[1, 2], prompt_length=2, truncate_status="prompt_truncated", logprobs=[0.0] * 3
    )
    assert experience.action_mask is not None
    assert experience.action_mask.tolist() == [False] * 3


def test_dpo_is_all_prompt() -> None:
    experience = Experience(tokens=[1, 2, 3], chosen=[4], rejected=[5, 6], prompt_length=7)
    assert (experience.experience_type, experience.prompt_length) == ("dpo", 3)
    assert experience.action_mask is None


def test_an_action_mask_makes_it_multi_turn() -> None:
    experience = Experience(
        tokens=[1], prompt_length=1, action_mask=[True], chosen=[1], rejected=[2]
    )
    assert experience.experience_type == "multi_turn"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tokens": [1, 2], "prompt_length": 2}, "2 tokens, but a prompt of 2"),
        ({"tokens": [1, 2], "prompt_length": 0}, "prompt_length is 0"),
        (
            {"tokens": [1], "prompt_length": 1, "truncate_status": "prompt_truncated"},
            "needs logprobs",
        ),
    ],
)
def test_a_single_turn_without_response_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Experience(**arguments)


def test_eid_may_be_a_dict() -> None:
    assert Experience(tokens=[1, 2], prompt_length=1, eid={"batch": 3, "suffix": "a"}).eid == EID(
        3, suffix="a"
    )


def test_deserialize_wants_one() -> None:
    payload = Experience.serialize_many([Experience(tokens=[1, 2], prompt_length=1)] * 2)
    with pytest.raises(ValueError, match="2 experiences, not 1"):
        Experience.deserialize(payload)
    assert len(Experience.deserialize_many(payload)) == 2


def test_to_dict_describes_what_is_there() -> None:
    experience = Experience(
        eid=EID(1, 2, 3, 5, "a"),
        tokens=[1, 2, 3],
        prompt_length=1,
        reward=1,
        messages=[],
        prompt_text="",
    )
    assert experience.to_dict() == {
        "eid": {"batch": 1, "task": 2, "run": 3, "step": 5, "suffix": "a"},
        "type": "single_turn",
        "prompt_length": 1,
        "response_length": 2,
        "info": {},
        "metrics": {},
        "prompt_text": "",
        "messages": [],
        "reward": 1.0,
    }


def test_it_can_be_sent_to_another_process() -> None:
    experience = Experience(tokens=[1, 2, 3], prompt_length=1, extra={"values": torch.ones(2)})
    copy = pickle.loads(pickle.dumps(experience))
    assert copy.serialize() == experience.serialize()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"extra": {"a": torch.empty(2**30, 2**30, 0)}}, "a"),
        ({"extra": {"a": torch.zeros([1] * 65)}}, "a"),
    ],
    ids=["an empty tensor beyond strides", "too many dimensions"],
)
def test_what_no_server_would_read_is_refused_for_itself(
    change: dict[str, Any], where: str
) -> None:
    good = Experience(tokens=[1, 2], prompt_length=1)
    bad = Experience(tokens=[1, 2], prompt_length=1, **change)
    with pytest.raises(TrxpError, match=rf"items\[1\]\.{where}") as refused:
        trxp.encode([good, bad])
    assert refused.value.item == 1


# --- inputs of estimators that Trinity-RFT's class lacks: one thing as attribute and on the wire


def with_inputs(**arguments: Any) -> Experience:
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
    made = with_inputs(**TENSORS)
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


def test_numbers_lie_in_info() -> None:
    made = with_inputs(info={"model_version": 3}, **NUMBERS)
    assert made.info == {"model_version": 3, **NUMBERS}
    assert (made.baseline_reward, made.env_state_hash, made.num_turns) == (0.25, "ab12", 2)
    assert with_inputs(baseline_reward=torch.tensor(0.5)).info == {"baseline_reward": 0.5}


def test_nothing_given_is_nothing_sent() -> None:
    made = with_inputs()
    assert (dict(made.extra), made.info) == ({}, {})
    for name in (*TENSORS, *NUMBERS):
        assert getattr(made, name) is None


def test_assignment_is_seen_both_ways_and_none_removes() -> None:
    made = with_inputs()
    made.values = [1.0, 2.0, 3.0]
    assert made.extra["values"].dtype == torch.float32
    made.extra["values"] = torch.zeros(4)
    assert made.values is made.extra["values"]
    made.num_turns = 3
    assert made.info["num_turns"] == 3
    made.info["num_turns"] = 5
    assert made.num_turns == 5
    made.values = made.num_turns = made.env_state_hash = made.versions = None
    assert (dict(made.extra), made.info) == ({}, {})


def test_an_info_that_is_shared_is_left_alone() -> None:
    shared = {"task": "t"}
    first, second = with_inputs(info=shared), with_inputs(info=shared, baseline_reward=0.5)
    first.env_state_hash = "a"
    second.env_state_hash = "b"
    assert (first.env_state_hash, second.env_state_hash) == ("a", "b")
    assert shared == {"task": "t"}
    assert with_inputs(info=shared).info is shared


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"values": [1.0], "extra": {"values": torch.ones(1)}}, "values .* twice"),
        ({"num_turns": 2, "info": {"num_turns": 3}}, "num_turns .* twice"),
    ],
)
def test_one_input_given_twice_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        with_inputs(**arguments)


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
    with pytest.raises(InvalidRequestError, match=f"{name} is .*; give"):
        with_inputs(**{name: value})


def test_they_travel_in_the_payload_and_come_back() -> None:
    extra = {"action_entropy": torch.rand(3)}
    made = with_inputs(extra=extra, **TENSORS, **NUMBERS)
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
        with_inputs(**TENSORS, **NUMBERS).serialize()
        == with_inputs(extra=extra, info=dict(NUMBERS)).serialize()
    )
