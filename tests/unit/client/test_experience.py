from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from experience_buffer import trxp
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError
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
        name: value.dtype for name, value in vars(experience).items() if torch.is_tensor(value)
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
    tokens = torch.tensor([1, 2, 3])
    experience = Experience(tokens=tokens, logprobs=np.array([0.5, 0.25]))
    assert experience.tokens is tokens
    assert experience.logprobs is not None
    assert experience.logprobs.dtype == torch.float64


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
    experience = Experience(tokens=[1], action_mask=[True], chosen=[1], rejected=[2])
    assert experience.experience_type == "multi_turn"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tokens": [1, 2], "prompt_length": 2}, "2 tokens, but a prompt of 2"),
        ({"tokens": [1, 2], "prompt_length": 0}, "prompt_length is 0"),
        ({"tokens": [1], "truncate_status": "prompt_truncated"}, "needs logprobs"),
    ],
)
def test_a_single_turn_without_response_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Experience(**arguments)


def test_eid_may_be_a_dict() -> None:
    assert Experience(tokens=[1, 2], eid={"batch": 3, "suffix": "a"}).eid == EID(3, suffix="a")


def test_deserialize_wants_one() -> None:
    payload = Experience.serialize_many([Experience(tokens=[1, 2])] * 2)
    with pytest.raises(ValueError, match="2 experiences, not 1"):
        Experience.deserialize(payload)
    assert len(Experience.deserialize_many(payload)) == 2


def test_to_dict_describes_what_is_there() -> None:
    experience = Experience(
        eid=EID(1, 2, 3, 5, "a"), tokens=[1, 2, 3], reward=1, messages=[], prompt_text=""
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
    experience = Experience(tokens=[1, 2, 3], extra={"values": torch.ones(2)})
    copy = pickle.loads(pickle.dumps(experience))
    assert copy.serialize() == experience.serialize()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"multi_modal_inputs": {1: torch.zeros(1), "1": torch.ones(1)}}, "multi_modal_inputs"),
        ({"extra": {"a": torch.empty(2**30, 2**30, 0)}}, "a"),
        ({"extra": {"a": torch.zeros([1] * 65)}}, "a"),
    ],
    ids=["names written alike", "an empty tensor beyond strides", "too many dimensions"],
)
def test_what_no_server_would_read_is_refused_for_itself(
    change: dict[str, Any], where: str
) -> None:
    good = Experience(tokens=[1, 2], prompt_length=1)
    bad = Experience(tokens=[1, 2], prompt_length=1, **change)
    with pytest.raises(TrxpError, match=rf"items\[1\]\.{where}") as refused:
        trxp.encode([good, bad])
    assert refused.value.item == 1
