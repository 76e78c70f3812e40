"""Collation functions: equal to what `collation` gathers, named as frameworks name it, picklable."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience, InvalidRequestError, collation
from experience_buffer._data.collation_input import as_packed
from experience_buffer.collation import (
    areal_collate,
    padded_collate,
    trinity_collate,
    trl_collate,
    varlen_collate,
    verl_collate,
)

PAD = 50_257
TOKEN_FIELDS = ("logprobs", "advantages", "returns")


def experience(run: int, **fields: Any) -> Experience:
    """Prompts of 3, 4, 5... tokens, responses of 7, 5, 3, 1..."""
    prompt, response = 3 + run, max(7 - 2 * run, 1)
    generator = torch.Generator().manual_seed(run)
    own = {name: torch.rand(response, generator=generator) for name in TOKEN_FIELDS}
    return Experience(
        eid=EID(batch=2, task=run // 2, run=run, step=0, suffix="c0de"),
        tokens=torch.randint(0, 50_021, (prompt + response,), generator=generator),
        prompt_length=prompt,
        action_mask=torch.arange(response) % 3 != 1,
        reward=(run + 1) / 7,
        extra={"versions": torch.full((response,), 11 + run)},
        **{**own, **fields},
    )


EXPERIENCES = [experience(run) for run in range(4)]
P, R = 6, 7


@pytest.fixture(params=["packed", "list"])
def given(request: pytest.FixtureRequest) -> Any:
    """The same experiences, packed and not."""
    return as_packed(EXPERIENCES) if request.param == "packed" else EXPERIENCES


def gathered(name: str) -> torch.Tensor:
    return collation.gather_response_attrs(EXPERIENCES, name, R)


def test_padded_has_the_lengths_that_are_given(given: Any) -> None:
    wider = padded_collate(pad_token_id=PAD, max_prompt_length=11, max_response_length=13)(given)
    assert wider["input_ids"].equal(collation.gather_token_ids(EXPERIENCES, 11, 13, PAD))
    assert wider["versions"].equal(collation.gather_response_attrs(EXPERIENCES, "versions", 13))


def test_columns_are_added(given: Any) -> None:
    for make in (
        padded_collate(pad_token_id=0, columns=["reward", "uid", "task"], fields=["logprobs"]),
        varlen_collate(columns=["reward", "uid", "task"], fields=["logprobs"]),
    ):
        batch = make(given)
        assert batch["reward"].tolist() == [1 / 7, 2 / 7, 3 / 7, 4 / 7]
        assert batch["uid"] == [each.eid.uid for each in EXPERIENCES]
        assert batch["task"] == ["2/0", "2/0", "2/1", "2/1"]
        assert "advantages" not in batch
    with pytest.raises(InvalidRequestError, match="'logprobs' has the name of another entry"):
        padded_collate(pad_token_id=0, columns=["logprobs"])(given)
    with pytest.raises(KeyError, match="no column 'colour'"):
        varlen_collate(columns=["colour"])(given)


def test_verl_is_what_trinity_makes_for_verl(given: Any) -> None:
    theirs = importlib.import_module("trinity.common.experience")
    batch = verl_collate(pad_token_id=PAD)(given)
    tokens = theirs.gather_token_ids(EXPERIENCES, P, R, PAD).long()
    attention_mask = theirs.gather_attention_masks(EXPERIENCES, P, R).long()
    assert batch["input_ids"].equal(tokens)
    assert batch["prompts"].equal(tokens[:, :P])
    assert batch["responses"].equal(tokens[:, P:])
    assert batch["attention_mask"].equal(attention_mask)
    assert batch["position_ids"].equal((attention_mask.cumsum(-1) - 1).clip(0))
    assert batch["response_mask"].equal(theirs.gather_action_masks(EXPERIENCES, R).long())
    assert batch["rollout_log_probs"].equal(gathered("logprobs"))
    assert batch["advantages"].equal(gathered("advantages"))
    assert batch["returns"].equal(gathered("returns"))
    assert batch["uid"].tolist() == [each.eid.tid for each in EXPERIENCES]
    assert batch["unique_ids"].tolist() == [each.eid.uid for each in EXPERIENCES]
    assert batch["versions"].equal(gathered("versions"))
    assert not {"logprobs", "action_mask", "ref_log_prob"} & set(batch)
    for row, each in zip(batch["token_level_scores"], EXPERIENCES, strict=True):
        last = len(each.tokens) - each.prompt_length - 1
        assert row.nonzero().flatten().tolist() == [last]
        assert row[last] == torch.tensor(each.reward)


def test_verl_takes_rewards_per_token_first_and_names_who_has_none() -> None:
    rewards = [experience(run, token_level_reward=torch.rand(7 - 2 * run)) for run in range(3)]
    batch = verl_collate(pad_token_id=0)(rewards)
    assert batch["token_level_scores"].equal(
        collation.gather_response_attrs(rewards, "token_level_reward", R)
    )
    lacking = experience(1)
    lacking.reward = None
    with pytest.raises(ValueError, match=r"2/0/1/0/c0de: reward is None, but 1 of the 2 exp"):
        verl_collate(pad_token_id=0)([experience(0), lacking])
    for make, members in (
        (verl_collate(pad_token_id=0, drop=["reward"]), [experience(0), lacking]),
        (verl_collate(pad_token_id=0), [lacking]),
    ):
        assert "token_level_scores" not in make(members)


def test_trl_has_the_inputs_of_its_loss() -> None:
    members = [experience(run) for run in range(4)]
    for run, each in enumerate(members):
        each.extra["ref_logprobs"] = torch.full((max(7 - 2 * run, 1),), -0.5)
    batch = trl_collate(pad_token_id=PAD, max_prompt_length=P, max_completion_length=R)(members)
    tokens = collation.gather_token_ids(members, P, R, PAD)
    attention_mask = collation.gather_attention_masks(members, P, R).long()
    assert batch["prompt_ids"].equal(tokens[:, :P])
    assert batch["prompt_mask"].equal(attention_mask[:, :P])
    assert batch["completion_ids"].equal(tokens[:, P:])
    assert batch["completion_mask"].equal(attention_mask[:, P:])
    assert batch["tool_mask"].equal(collation.gather_action_masks(members, R).long())
    assert batch["old_per_token_logps"].equal(gathered("logprobs"))
    assert batch["advantages"].equal(gathered("advantages"))
    assert batch["ref_per_token_logps"].sum() == -0.5 * (7 + 5 + 3 + 1)
    assert batch["returns"].equal(gathered("returns"))
    assert batch["versions"].equal(gathered("versions"))
    assert len(batch) == 10


def after(num_prompt: int, value: int, response: torch.Tensor | None) -> torch.Tensor:
    assert response is not None
    return torch.cat([torch.full((num_prompt,), value), response])


def test_areal_is_padded_on_the_right(given: Any) -> None:
    batch = areal_collate(pad_token_id=PAD)(given)
    assert batch["rewards"].equal(torch.tensor([each.reward for each in EXPERIENCES]))
    for row, each in enumerate(EXPERIENCES):
        total, prompt = len(each.tokens), each.prompt_length
        expected = {
            "input_ids": (each.tokens, PAD),
            "attention_mask": (torch.ones(total, dtype=torch.bool), 0),
            "loss_mask": (after(prompt, 0, each.action_mask), 0),
            "logprobs": (after(prompt, 0, each.logprobs), 0),
            "advantages": (after(prompt, 0, each.advantages), 0),
            "versions": (after(prompt, -1, each.extra["versions"]), 0),
        }
        for name, (values, padding) in expected.items():
            assert batch[name][row, :total].tolist() == values.tolist(), name
            assert (batch[name][row, total:] == padding).all(), name
        assert batch["input_ids"].shape == batch["returns"].shape == (4, 10)


def test_areal_refuses_a_bootstrap_value() -> None:
    with_bootstrap = experience(0)
    with_bootstrap.extra["values"] = torch.rand(8)
    with pytest.raises(ValueError, match="values isn't one number per response token"):
        areal_collate()([with_bootstrap])


def test_trinity_gets_experiences(given: Any) -> None:
    theirs = importlib.import_module("trinity.common.experience")
    found = trinity_collate()(given)
    assert [each.eid.uid for each in found] == [each.eid.uid for each in EXPERIENCES]
    assert theirs.gather_token_ids(found, P, R, PAD).equal(
        collation.gather_token_ids(EXPERIENCES, P, R, PAD)
    )
    assert theirs.gather_response_attrs(found, "advantages", R).equal(gathered("advantages"))


@pytest.mark.parametrize(
    "make", [verl_collate(pad_token_id=0), trl_collate(pad_token_id=0), areal_collate()]
)
def test_dpo_experiences_are_refused_with_the_cure(make: Any) -> None:
    dpo = Experience(
        eid=EID(batch=1, task=2, run=3),
        tokens=torch.arange(5),
        chosen=torch.arange(3),
        rejected=torch.arange(2),
    )
    with pytest.raises(ValueError, match="split_dpo_experience_to_single_turn"):
        make([dpo])
    halves = collation.split_dpo_experience_to_single_turn([dpo])
    assert len(make(halves)["input_ids" if "input_ids" in make(halves) else "prompt_ids"]) == 2


@pytest.mark.parametrize(
    "make",
    [
        padded_collate(pad_token_id=3, fields=["logprobs"], columns=["reward"]),
        varlen_collate(),
        verl_collate(pad_token_id=3),
        trl_collate(pad_token_id=3),
        areal_collate(),
    ],
)
def test_collation_functions_travel(make: Any) -> None:
    copy = pickle.loads(pickle.dumps(make))
    ours, theirs = make(EXPERIENCES), copy(as_packed(EXPERIENCES))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = (
            value.equal(theirs[name])
            if torch.is_tensor(value)
            else list(value) == list(theirs[name])
        )
        assert same, name
    assert pickle.loads(pickle.dumps(trinity_collate())) is trinity_collate()
