"""Inputs of estimators at the gate: what is refused, what counts as missing, what is read."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from experience_buffer import trxp
from experience_buffer_server import advantages
from experience_buffer_server.advantages.experience_inputs import (
    Needs,
    explain_missing,
    fits_float32,
    input_fields,
    input_problem,
    read_inputs,
    response_tokens,
)
from experience_buffer_server.buffer.compute.worker import experience_input
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Candidate, Reason, Refusal
from experience_buffer_server.settings.buffer import BufferSettings
from tests.unit.builders import NUM_RESPONSE, experience, settings

T = NUM_RESPONSE
NUMBERS = [0.5] * T
NEAR_END = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
"""The largest float32."""
ALL: dict[str, str] = {
    "values": "gae",
    "token_level_reward": "reinforce",
    "logprobs": "on_policy_distill",
    "teacher_logprobs": "on_policy_distill",
    "ref_logprobs": "rloo",
    "baseline_reward": "remax",
    "env_state_hash": "gigpo",
    "num_turns": "grpo",
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "rloo": {"kl_coef": 0.5},
    "grpo": {"turn_rewards": "concatenated"},
}


def item(**fields: Any) -> trxp.Item:
    (made,) = trxp.read(trxp.encode([experience(1, 2, **fields)]))
    assert isinstance(made, trxp.Item)
    return made


def buffer(name: str = "", **more: Any) -> BufferSettings:
    """A buffer whose estimator reads an input; without a name, one that has none."""
    if not name:
        return settings(**more)
    estimator = ALL[name]
    return settings(advantage={"estimator": estimator} | PARAMETERS.get(estimator, {}), **more)


def plan_of(config: BufferSettings) -> advantages.Plan:
    assert config.advantage.plan is not None
    return config.advantage.plan


def with_entry(name: str, value: Any) -> trxp.Item:
    """Everything that any estimator needs, and one entry of `info` in place of what was there."""
    made = item(
        ref_logprobs=torch.zeros(T),
        teacher_logprobs=torch.zeros(T),
        baseline_reward=0.5,
        env_state_hash="s",
        values=torch.zeros(T),
    )
    made.tensors.pop(name, None)
    return trxp.Item(
        made.index,
        made.eid,
        made.meta | {"info": {**made.meta["info"], name: value}},
        made.tensors,
        made.keys,
    )


LISTS = ["values", "token_level_reward", "logprobs", "teacher_logprobs", "ref_logprobs"]
BAD_LISTS: list[tuple[Any, str]] = [
    ("0.5", "is '0.5'; send a list of 7 numbers"),
    (0.5, "is 0.5; send a list of 7 numbers"),
    ({"a": 1}, "is a dict; send a list of 7 numbers"),
    ([0.5] * (T - 1) + [True], "[6] is True; send a list"),
    ([None] * T, "[0] is a NoneType; send a list"),
    ([0.5, "x"] + [0.5] * (T - 2), "[1] is 'x'; send a list"),
    ([0.5] * (T - 1), "has 6 numbers but the response has 7; send a list of 7"),
    ([0.5] * (T + 2), "has 9 numbers but the response has 7; send a list of 7"),
    ([], "has 0 numbers but the response has 7; send a list of 7"),
    ([10**400] * T, "has an integer that no float holds; send a list"),
]
BAD_SCALARS: list[tuple[str, Any, str]] = [
    ("baseline_reward", True, "is True; send baseline_reward as an entry of info: a number"),
    ("baseline_reward", "1", "is '1'; send"),
    ("baseline_reward", [1.0], "is a list; send"),
    ("baseline_reward", float("nan"), "is nan; send"),
    ("baseline_reward", -float("inf"), "is -inf; send"),
    ("baseline_reward", 1e39, "is 1e+39; send"),
    ("baseline_reward", 10**400, "is an integer of 1329 bits; send"),
    ("env_state_hash", 17, "is 17; send env_state_hash as an entry of info: a text"),
    ("env_state_hash", "", "is ''; send"),
    ("env_state_hash", b"ab", "is a bytes; send"),
    ("num_turns", 0, "is 0; send num_turns as an entry of info: a whole number"),
    ("num_turns", 1.5, "is 1.5; send"),
    ("num_turns", True, "is True; send"),
    ("num_turns", "2", "is '2'; send"),
    ("num_turns", 2**63, "is an integer of 64 bits; send"),
    ("num_turns", float("inf"), "is inf; send"),
]
BAD = [(name, value, text) for name in LISTS for value, text in BAD_LISTS] + BAD_SCALARS


@pytest.mark.parametrize(("name", "value", "text"), BAD)
def test_an_input_of_the_wrong_kind_is_invalid_and_not_missing(
    name: str, value: Any, text: str
) -> None:
    bad = with_entry(name, value)
    for policy in ("refuse", "wait"):
        refusal = admit(bad, buffer(name, on_missing_field=policy))
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.INVALID
        assert f"info[{name!r}]" in refusal.message
        assert text in refusal.message
    # Nobody reads it, in a buffer without estimator or with another: it may be anything.
    assert isinstance(admit(bad, buffer()), Candidate)
    other = buffer("baseline_reward" if name != "baseline_reward" else "values")
    names = read_inputs(plan_of(other))
    if name not in names:
        assert isinstance(admit(bad, other), Candidate)
        assert getattr(experience_input(bad, "r", names=names), name) is None
    with pytest.raises(LookupError, match=name):
        experience_input(bad, "r", names={name})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, NUMBERS) for name in LISTS]
    + [
        ("values", [1] * (T + 1)),
        ("baseline_reward", 3),
        ("baseline_reward", NEAR_END),
        ("env_state_hash", "a1"),
        ("num_turns", 2),
        ("num_turns", 2.0),
    ],
)
def test_a_sound_input_in_info_is_stored_and_read(name: str, value: Any) -> None:
    sound = with_entry(name, value)
    config = buffer(name)
    candidate = admit(sound, config)
    assert isinstance(candidate, Candidate), candidate
    read = experience_input(sound, "r", names=read_inputs(plan_of(config)))
    found = getattr(read, name)
    if name in LISTS:
        assert (found.dtype, len(found.data)) == ("F64", 8 * len(value))
    else:
        assert found == value
        assert type(found) in (float, str, int)


@pytest.mark.parametrize("name", LISTS)
def test_a_tensor_and_an_entry_of_one_name_are_ambiguous(name: str) -> None:
    both = with_entry(name, NUMBERS)
    both.tensors[name] = trxp.TensorView("F32", (T,), memoryview(bytes(4 * T)))
    refusal = admit(both, buffer(name))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.INVALID
    assert f"{name} is given twice, as a tensor and as info[{name!r}]" in refusal.message
    assert isinstance(admit(both, buffer()), Candidate)


def test_log_probabilities_in_info_stand_in_for_the_empty_tensor() -> None:
    empty = with_entry("logprobs", NUMBERS)
    empty.tensors["logprobs"] = trxp.TensorView("F32", (0,), memoryview(b""))
    assert isinstance(admit(empty, buffer("logprobs")), Candidate)
    column = experience_input(empty, "r", names={"logprobs"}).logprobs
    assert column is not None
    assert column.num_bytes == 8 * T


def test_a_response_of_no_token_has_all_of_its_log_probabilities() -> None:
    none = item(tokens=torch.tensor([5, 6]), prompt_length=2, action_mask=torch.ones(0).bool())
    plan = plan_of(buffer("teacher_logprobs"))
    for name in ("logprobs", "teacher_logprobs"):
        none.tensors.pop(name, None)
        assert name in Needs(plan).missing(input_fields(none))
        none.tensors[name] = trxp.TensorView("F32", (0,), memoryview(b""))
        assert name not in Needs(plan).missing(input_fields(none))
    assert isinstance(admit(none, buffer("teacher_logprobs")), Candidate)
    read = experience_input(none, "r", names={"logprobs"})
    assert read.logprobs is not None
    assert read.logprobs.num_bytes == 0
    none.meta["info"]["logprobs"] = []
    assert isinstance(admit(none, buffer("teacher_logprobs")), Candidate), "nothing is given twice"


@pytest.mark.parametrize("name", ["baseline_reward", "env_state_hash", "num_turns"])
def test_a_scalar_as_a_tensor_is_refused(name: str) -> None:
    odd = with_entry(name, None)
    odd.tensors[name] = trxp.TensorView("F32", (1,), memoryview(bytes(4)))
    refusal = admit(odd, buffer(name))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.INVALID
    assert f"{name} is a tensor; send {name} as an entry of info" in refusal.message


def test_a_reward_in_info_is_no_reward() -> None:
    plan = advantages.plan("grpo", {})
    lost = with_entry("reward", 1.0)
    lost.meta["reward"] = None
    assert Needs(plan).missing(input_fields(lost)) == ("reward",)


@pytest.mark.parametrize("reward", [1e39, -1e39, 3.5e38, 10**40, 10**400, float("nan")])
def test_a_reward_that_float32_does_not_hold_is_refused(reward: float) -> None:
    bad = item()
    bad.meta["reward"] = reward
    for config in (settings(), settings(advantage={"estimator": "grpo"})):
        refusal = admit(bad, config)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.INVALID
        assert refusal.message.startswith("reward is ")
        assert refusal.message.endswith("; send a finite number or a tombstone")
    dead = admit(bad, settings(on_bad_reward="tombstone"))
    assert isinstance(dead, Candidate)
    assert dead.tombstone


def test_the_ends_of_float32_fit() -> None:
    assert all(
        fits_float32(sign * x) for x in (NEAR_END, 3.4028235e38, 0, 1e-300) for sign in (1, -1)
    )
    assert not any(fits_float32(x) for x in (2.0**128, float("inf"), float("nan")))


@pytest.mark.parametrize("status", ["response_truncated", "prompt_truncated", "", None])
def test_only_a_truncated_response_bootstraps(status: str | None) -> None:
    one = item(values=torch.ones(T + 1))
    one.meta["truncate_status"] = status
    assert isinstance(admit(one, buffer("values")), Candidate)
    read = experience_input(one, "r", names={"reward", "values"})
    assert read.truncated is (status == "response_truncated")


def test_what_is_missing_is_told_with_its_own_cure() -> None:
    def told(*fields: str) -> str:
        return explain_missing(fields, "gae", num_tokens=7)

    assert told("values") == (
        "values is missing; the estimator 'gae' needs it: send values as an extra tensor, or "
        "list in info, of T or T+1 numbers (T = 7 tokens), "
        'or set on_missing_field = "wait" and annotate it later'
    )
    assert told("reward") == (
        "reward is missing; the estimator 'gae' needs it: send reward as a number that is finite "
        "in float32, or push a tombstone if the rollout failed"
    )
    assert "send logprobs as a tensor, or list in info, of T numbers (T = 7" in told("logprobs")
    assert "send baseline_reward as an entry of info: a number" in told("baseline_reward")
    assert "send env_state_hash as an entry of info: a text" in told("env_state_hash")
    assert told("values", "reward|token_level_reward") == (
        "values, reward or token_level_reward are missing; the estimator 'gae' needs them: "
        "send values as an extra tensor, or list in info, of T or T+1 numbers (T = 7 tokens), "
        "send reward as a number that is finite in float32, or token_level_reward as a tensor, "
        "or list in info, of T numbers (T = 7 tokens), or push a tombstone if the rollout failed, "
        'or set on_missing_field = "wait" and annotate them later'
    )


def test_the_gate_tells_what_is_missing() -> None:
    refusal = admit(item(), buffer("values"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.MISSING_FIELD
    assert "of T or T+1 numbers (T = 7 tokens)" in refusal.message
    assert isinstance(admit(item(), buffer("values", on_missing_field="wait")), Candidate)


def test_a_missing_baseline_is_no_missing_reward() -> None:
    """It may still come, where the buffer waits: the rollout hasn't failed."""
    policies = {"on_bad_reward": "tombstone", "on_missing_field": "wait"}
    waiting = admit(item(), buffer("baseline_reward", **policies))
    assert isinstance(waiting, Candidate)
    assert not waiting.tombstone
    without = item()
    without.meta["reward"] = None
    for name in ("token_level_reward", "num_turns"):  # reward|token_level_reward, and reward.
        dead = admit(without, buffer(name, **policies))
        assert isinstance(dead, Candidate)
        assert dead.tombstone


def test_an_advantage_may_be_a_name_alone() -> None:
    assert settings(advantage="grpo") == settings(advantage={"estimator": "grpo"})


def test_without_inputs_nothing_is_a_problem() -> None:
    assert input_problem(item(), ()) == ""
    assert response_tokens(item()) == T
