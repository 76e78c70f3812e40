"""Experiences of other classes are pushed as what they are: Trinity-RFT's, and what has its fields."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience, TrxpError
from experience_buffer._messages import push_split
from experience_buffer.options import ClientOptions
from experience_buffer.outcomes import PushOutcome

trinity = importlib.import_module("trinity.common.experience")


def pushed(*experiences: Any) -> bytes:
    return b"".join(push_split.encode(experiences))


def theirs(**fields: Any) -> Any:
    given = {"eid": trinity.EID(batch=3, task=5, run=7, suffix="a"), "tokens": [11, 13, 17, 19]}
    return trinity.Experience(**(given | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_length": 2, "reward": 0.5, "logprobs": [-0.5, -0.25], "info": {"x": [1]}},
        {"prompt_length": 2, "action_mask": [1, 0], "metrics": {"a": 1.0}},
        {"prompt_length": 2, "action_mask": torch.tensor([1, 0]), "messages": [{"role": "user"}]},
        {"chosen": [1, 2], "rejected": [3]},
        {
            "prompt_length": 2,
            "multi_modal_inputs": {"pixels": torch.ones(2, 3)},
            "custom_fields": [trinity.CustomField("x", "y", torch.float32)],
            "info": {"x": 2.0},
        },
        {"prompt_length": 2, "routed_experts": torch.ones(3, 2, 2, dtype=torch.uint8)},
        {"truncate_status": "prompt_truncated", "logprobs": [0.0] * 3, "tokens": [1]},
    ],
)
def test_trinitys_own_is_pushed_byte_for_byte(fields: dict[str, Any]) -> None:
    experience = theirs(**fields)
    assert pushed(experience) == experience.serialize()
    ours = Experience(eid=EID(0, 0), tokens=[1, 2], prompt_length=1)
    both = Experience.deserialize_many(pushed(ours, experience))
    assert [each.eid.uid for each in both] == [ours.eid.uid, "3/5/7/0/a"]


def test_so_is_one_that_was_changed_since() -> None:
    experience = theirs(prompt_length=2)
    experience.reward = torch.tensor(0.5)
    experience.eid.run = 9
    (back,) = Experience.deserialize_many(pushed(experience))
    assert (back.reward, back.eid.run) == (0.5, 9)


def test_what_has_their_fields_is_taken_for_one() -> None:
    fields: dict[str, Any] = {
        "eid": SimpleNamespace(batch=3, task=5, run=7, step=0, suffix="a"),
        **{"tokens": torch.arange(4), "prompt_length": 2, "reward": 0.5},
        **{"logprobs": None, "extra": {"values": [0.5, 1.5]}},
    }
    (back,) = Experience.deserialize_many(pushed(SimpleNamespace(**fields)))
    assert (back.eid.uid, back.tokens.tolist(), back.reward) == ("3/5/7/0/a", [0, 1, 2, 3], 0.5)
    assert back.values is not None
    assert back.values.tolist() == [0.5, 1.5]


def test_a_class_derived_from_ours_is_ours() -> None:
    class Mine(Experience):
        pass

    mine = Mine(eid=EID(1, 2, 3, 4, "a"), tokens=[1, 2], prompt_length=1)
    assert pushed(mine) == mine.serialize()


@dataclasses.dataclass
class Sample:
    """Of some framework: no experience."""

    tokens: list[int]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tokens": [1, 2]}, "a dict, not an experience; make it one: Experience"),
        (Sample([1, 2]), "a Sample, not an experience"),
        (b"TRXP", "a bytes, not an experience"),
        (None, "a NoneType, not an experience"),
        (theirs(prompt_length=2, tokens=torch.ones(4)), r"tokens\[0\] is 1.0, of torch.float32"),
        (theirs(prompt_length=2, reward=torch.ones(2)), "reward is .*; give a number"),
    ],
)
def test_what_is_none_is_refused_alone(wrong: Any, text: str) -> None:
    good = Experience(eid=EID(0, 0), tokens=[1, 2], prompt_length=1)
    with pytest.raises(TrxpError, match=rf"^items\[1\]: {text}") as refused:
        pushed(good, wrong)
    assert refused.value.item == 1
    first, outcome, last = push_split.encode_pieces([good, wrong, good], ClientOptions())
    assert isinstance(outcome, PushOutcome)
    assert (outcome.index, outcome.status) == (1, "refused")
    assert not isinstance(first, PushOutcome)
    assert not isinstance(last, PushOutcome)
