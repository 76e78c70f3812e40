"""What a launch does with single groups: failures, votes, flags, masks, records."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from experience_buffer_server.advantages import (
    Column,
    ExperienceInput,
    ParameterError,
    compute,
)
from experience_buffer_server.advantages.group_relative import score_grpo, score_rloo
from experience_buffer_server.advantages.packed import PackedBatch, pack, transfer
from experience_buffer_server.advantages.registry import REGISTRY
from experience_buffer_server.advantages.specs import GaeParameters

from .builders import DTYPES, advantages, column, computed, experience, failed, floats

ITEM_ESTIMATORS = ["reinforce", "gae"]
ALL = ["grpo", "rloo", *ITEM_ESTIMATORS]


def scores(members: list[ExperienceInput], estimator: str = "grpo") -> list[float]:
    result = computed(compute([members], estimator=estimator, parameters={})[0])
    return [advantages(item)[0] for item in result.items]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1e-30, -7.7, 16777217.0, 3e38])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 61])
def test_equal_rewards_give_exactly_zero(estimator: str, reward: float, size: int) -> None:
    members = [experience(reward) for _ in range(size)]
    result = computed(compute([members], estimator=estimator, parameters={})[0])
    assert all(advantages(item) == [0.0, 0.0] for item in result.items)
    assert result.details["zero_variance"] is True


def test_rewards_that_are_equal_in_float32_are_equal() -> None:
    assert scores([experience(0.1), experience(0.1 + 1e-12)]) == [0.0, 0.0]


def test_details_of_grpo() -> None:
    members = [experience(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    result = computed(compute([members], estimator="group_norm", parameters={"eps": 0.25})[0])
    assert result.details == {
        "estimator": "grpo",
        "parameters.eps": 0.25,
        "members": 5,
        "votes": 5,
        "mean": 0.5,
        "std": 0.5,
        "zero_variance": False,
        "singleton": False,
    }
    assert [advantages(item)[0] for item in result.items] == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0]
    )


def test_details_of_item_estimators_hold_their_parameters() -> None:
    result = computed(compute([[experience()]], estimator="reinforce", parameters={})[0])
    assert result.details == {
        "estimator": "reinforce",
        "parameters.gamma": 1.0,
        "parameters.mask_mode": "skip",
        "members": 1,
    }
    assert not result.items[0].singleton


def test_a_single_vote_is_flagged_and_gets_its_reward() -> None:
    for estimator, expected in (("grpo", 3.0 / (1 + 1e-6)), ("rloo", 3.0)):
        result = computed(compute([[experience(3.0)]], estimator=estimator, parameters={})[0])
        assert floats(result.items[0].advantages) == pytest.approx([expected] * 2, rel=1e-7)
        assert result.items[0].singleton
        assert result.details["singleton"] is True
        assert result.details["zero_variance"] is False


def test_a_run_votes_once_with_the_reward_of_its_highest_step() -> None:
    members = [
        experience(0.0, run="a", step=2),
        experience(9.0, run="a", step=0),
        experience(5.0, run="a", step=1),
        experience(2.0, run="b", step=0),
        experience(4.0),
    ]
    result = computed(compute([members], estimator="rloo", parameters={})[0])
    assert [advantages(i)[0] for i in result.items] == [-3.0, -3.0, -3.0, 0.0, 3.0]
    assert (result.details["votes"], result.details["members"]) == (3, 5)
    for order in itertools.permutations(range(5)):
        shuffled = compute([[members[m] for m in order]], estimator="rloo", parameters={})
        assert computed(shuffled[0]).items == tuple(result.items[m] for m in order)


def test_only_run_of_a_group_is_a_singleton_however_many_steps() -> None:
    members = [experience(float(step), run="a", step=step) for step in range(3)]
    result = computed(compute([members], estimator="grpo", parameters={})[0])
    assert [item.singleton for item in result.items] == [True] * 3
    assert [advantages(i)[0] for i in result.items] == pytest.approx([2 / (1 + 1e-6)] * 3)


def test_experiences_without_a_run_vote_each() -> None:
    assert scores([experience(1.0), experience(3.0)], "rloo") == [-2.0, 2.0]


def test_equal_steps_of_a_run_are_one_vote_if_they_agree_and_an_error_if_not() -> None:
    agreeing = [experience(1.0, run="a"), experience(1.0, run="a"), experience(3.0, run="b")]
    assert scores(agreeing, "rloo") == [-2.0, -2.0, 2.0]
    differing = [experience(1.0, run="a"), experience(3.0, run="a")]
    error = failed(compute([differing], estimator="grpo", parameters={})[0])
    assert "experiences 0 and 1 of the group share run 'a' and step 0" in error
    # Estimators without group statistics need no votes.
    computed(compute([differing], estimator="reinforce", parameters={})[0])


GOOD = experience(1.0, [True, False, True], values=[0.5, 0.25, 0.125])
BAD_MASK = Column("F32", bytes(12))


@pytest.mark.parametrize(
    ("estimators", "change", "message"),
    [
        (["grpo", "rloo"], {"reward": None}, "reward of experience 1 of the group is missing"),
        (ITEM_ESTIMATORS, {"reward": None}, "reward of experience 1 of the group is missing"),
        (ALL, {"reward": math.nan}, "reward of experience 1 of the group is nan"),
        (ALL, {"reward": math.inf}, "is inf, not finite in float32"),
        (ALL, {"reward": 1e39}, r"is 1e\+39, not finite in float32"),
        (ALL, {"mask": BAD_MASK}, "mask of experience 1 of the group has dtype F32; send one of"),
        (ALL, {"mask": Column("I32", bytes(7))}, "has 7 bytes, not a multiple of the 4 of I32"),
        (["gae"], {"values": None}, "values of experience 1 of the group is missing"),
        (
            ["gae"],
            {"values": column([1.0, 2.0], "F32")},
            "has 2 elements where its mask has 3; send 3 or 4",
        ),
        (["gae"], {"values": Column("I64", bytes(24))}, "values .* has dtype I64; send one of F16"),
        (
            ["gae"],
            {"values": column([1.0, math.nan, math.nan], "BF16")},
            "experience 1 of the group: values at a valid token is NaN",
        ),
        (["gae"], {"values": column([1.0, 0.0, 1e300], "F64")}, "beyond float32"),
        (
            ["gae"],
            {"values": column([1.0, 0.0, 1.0, math.inf], "F32"), "truncated": True},
            "bootstrap value",
        ),
        (
            ITEM_ESTIMATORS,
            {"token_level_reward": column([1.0, 2.0], "F32")},
            "token_level_reward .* has 2 elements where its mask has 3; send 3",
        ),
        (
            ITEM_ESTIMATORS,
            {"token_level_reward": column([1.0, 2.0, math.inf], "F32")},
            "token_level_reward at a valid token is NaN, infinite",
        ),
        (["reinforce"], {"token_level_reward": column([3e38, 0, 3e38], "F64")}, "result is beyond"),
    ],
)
def test_a_bad_group_fails_alone(
    estimators: list[str], change: dict[str, object], message: str
) -> None:
    bad = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    for estimator in estimators:
        good = compute([[GOOD, GOOD], [GOOD]], estimator=estimator, parameters={})
        outcomes = compute([[GOOD, GOOD], [GOOD, bad], [GOOD]], estimator=estimator, parameters={})
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failed(outcomes[1]))
        assert [outcomes[0], outcomes[2]] == good


def test_what_an_estimator_does_not_read_cannot_fail_it() -> None:
    odd = experience(1.0, [True], values=[math.nan, 1.0, 2.0], token_level_reward=[math.inf, 0.0])
    assert scores([odd, experience(3.0, [True])], "rloo") == [-2.0, 2.0]
    unread = experience(math.nan, [True], token_level_reward=[4.0])
    assert scores([unread], "reinforce") == [4.0]
    # A bootstrap value counts only where the experience was truncated.
    assert scores([experience(1.0, [True], values=[0.5, math.nan])], "gae") == [0.5]


def test_bootstrap_is_used_if_truncated_and_given() -> None:
    members = [
        experience(1.0, [True, False], values=[0.5, 9.0, 2.0], truncated=True),
        experience(1.0, [True, False], values=[0.5, 9.0, 2.0], truncated=False),
        experience(1.0, [True, False], values=[0.5, 9.0], truncated=True),
    ]
    for mode in ("count", "skip"):
        parameters: dict[str, float | bool | str] = {"gamma": 0.5, "mask_mode": mode}
        result = computed(compute([members], estimator="gae", parameters=parameters)[0])
        assert [advantages(i) for i in result.items] == [[1.5, 0.0], [0.5, 0.0], [0.5, 0.0]]
        assert [i.bootstrapped for i in result.items] == [True, False, False]


@pytest.mark.parametrize("estimator", ALL)
def test_a_mask_without_valid_tokens_gives_zeros_and_a_flag(estimator: str) -> None:
    members = [
        experience(1.0, [False] * 3, values=[math.nan] * 3),
        experience(2.0, [], values=[]),
        experience(4.0, [True], values=[0.0]),
    ]
    result = computed(compute([members], estimator=estimator, parameters={})[0])
    assert [item.zero_mask for item in result.items] == [True, True, False]
    assert floats(result.items[0].advantages) == floats(result.items[0].returns) == [0.0] * 3
    assert result.items[1].advantages == b""
    # It still votes: the rollout happened, only nothing of it is trained on.
    assert result.details["members"] == 3


@pytest.mark.parametrize("estimator", ALL)
def test_empty_launches_and_groups(estimator: str) -> None:
    assert compute([], estimator=estimator, parameters={}) == []
    outcomes = compute([[], [GOOD], []], estimator=estimator, parameters={})
    assert [len(computed(outcome).items) for outcome in outcomes] == [0, 1, 0]


@pytest.mark.parametrize("code", [c for c in DTYPES if not c.startswith(("F", "BF"))])
def test_any_nonzero_byte_of_a_mask_is_valid(code: str) -> None:
    size = torch.empty(0, dtype=DTYPES[code]).element_size()
    mask = Column(code, memoryview(b"".join(bytes(size - 1) + bytes([m]) for m in (128, 0, 2))))
    given = ExperienceInput(reward=2.0, mask=mask)
    assert floats(
        computed(compute([[given]], estimator="rloo", parameters={})[0]).items[0].advantages
    ) == [2.0, 0.0, 2.0]


def test_data_may_be_an_unaligned_view_of_any_format() -> None:
    packed = b"x" + bytes(column([1.0, 0.5], "F32").data)
    values = Column("F32", memoryview(packed)[1:])
    words = Column("F32", memoryview(bytes(values.data)).cast("i"))
    for data in (values, words):
        given = ExperienceInput(reward=1.0, mask=column([True, True], "BOOL"), values=data)
        assert scores([given], "gae") == [0.0]


def test_mask_modes_differ_only_across_gaps() -> None:
    given = experience(8.0, [False, True, False, False, True, False])
    results = {
        mode: advantages(
            computed(
                compute(
                    [[given]],
                    estimator="reinforce",
                    parameters={"gamma": 0.5, "mask_mode": mode},
                )[0]
            ).items[0]
        )
        for mode in ("count", "skip")
    }
    assert results == {"count": [0, 1.0, 0, 0, 8.0, 0], "skip": [0, 4.0, 0, 0, 8.0, 0]}


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("rewards", [[-0.0], [0.0, -0.0], [-0.0, 0.0]])
def test_negative_zero_never_comes_back(estimator: str, rewards: list[float]) -> None:
    members = [experience(reward, [True], values=[-0.0]) for reward in rewards]
    result = computed(compute([members], estimator=estimator, parameters={})[0])
    assert {item.advantages + item.returns for item in result.items} == {bytes(8)}


@pytest.mark.parametrize(
    ("votes", "mean"),
    [([1e20, 1.0, -1e20, 0.125], 1.125 / 4), ([0.1, 0.7, 1.3, 2.2, 0.001], 0.8602)],
)
def test_statistics_do_not_depend_on_the_order_of_votes(votes: list[float], mean: float) -> None:
    for score in (score_rloo, functools.partial(score_grpo, eps=1e-6)):
        expected = score(votes)
        assert expected.moments["mean"] == pytest.approx(mean, rel=1e-15)
        for order in itertools.permutations(range(len(votes))):
            shuffled = score([votes[m] for m in order])
            assert shuffled.scores == tuple(expected.scores[m] for m in order)
            assert shuffled.moments == expected.moments


def test_unknown_estimators_and_parameters_raise() -> None:
    with pytest.raises(ParameterError, match="unknown estimator"):
        compute([], estimator="ppo", parameters={})
    with pytest.raises(ParameterError, match="no parameter"):
        compute([], estimator="grpo", parameters={"lam": 1.0})


def test_a_transfer_moves_columns_of_two_dtypes_bit_for_bit() -> None:
    columns = [torch.tensor([1.5, math.nan]).double(), torch.arange(3), torch.empty(0).double()]
    moved = transfer(columns, device=torch.device("cpu"))
    for before, after in zip(columns, moved, strict=True):
        assert before.dtype == after.dtype
        assert before.numpy().tobytes() == after.numpy().tobytes()


def test_a_batch_on_another_device_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # No second device may be at hand: move through the staging buffer, to the CPU.
    batch = pack([[GOOD, experience(None, [True], values=[1.0], token_level_reward=[2.0])]])
    here = REGISTRY["gae"].tokens(batch, GaeParameters(gamma=0.5))
    monkeypatch.setattr(
        "experience_buffer_server.advantages.packed.transfer",
        lambda columns, *, device: transfer(columns, device=torch.device("cpu")),
    )
    moved: PackedBatch = batch.to(torch.device("meta"))
    assert moved is not batch
    there = REGISTRY["gae"].tokens(moved, GaeParameters(gamma=0.5))
    assert torch.equal(here.advantages, there.advantages)
    assert torch.equal(here.returns, there.returns)
