"""Rewards and advantages are centred and scaled over the right numbers, exactly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import TokenStages
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.kernels.devices import token_stages
from experience_buffer_server.advantages.stages.normalise import (
    clip_advantages,
    normalise_across_batch,
    normalise_advantages,
    normalise_rewards,
)
from tests.unit.advantages.builders import experience
from tests.unit.advantages.scalars import packed

Parameters = Any
GROUP = {"reward_norm_mean": "group", "reward_norm_std": "group"}
TOKENS = {"advantage_norm_mean": "group", "advantage_norm_std": "group"}


def normalised(
    groups: Sequence[Sequence[float]],
    parameters: dict[str, Any],
    batches: Sequence[int] | None = None,
) -> tuple[list[float], GroupDetails]:
    """Rewards of experiences that are runs of their own; they may be finer than float32."""
    members = [[experience(0.0, [True]) for _ in group] for group in groups]
    batch, chosen, details = packed(members, "reinforce", batches=batches, **parameters)
    rewards_B = np.array([reward for group in groups for reward in group], dtype=np.float64)
    return normalise_rewards(rewards_B, batch, chosen, details).tolist(), details


def placed(
    groups: Sequence[Sequence[tuple[list[float], list[bool]]]],
    parameters: dict[str, Any],
    batches: Sequence[int] | None = None,
) -> tuple[TokenStages, Any, Batch, Parameters, GroupDetails]:
    """Advantages that are the given numbers per token."""
    members = [
        [experience(None, mask, token_level_reward=row, dtype="F64") for row, mask in group]
        for group in groups
    ]
    batch, chosen, details = packed(members, "reinforce", batches=batches, **parameters)
    stages = token_stages(batch, device="cpu", threads=1, precision="float64")
    rewards = stages.rewards(np.zeros(len(batch.rewards)), None)
    tokens = stages.returns(rewards, gamma=0.0, mask_mode="skip")
    return stages, tokens, batch, chosen, details


def test_nothing_configured_changes_nothing() -> None:
    batch, chosen, details = packed([[experience()]], "reinforce")
    assert normalise_rewards(batch.rewards, batch, chosen, details) is batch.rewards
    stages, tokens, *rest = placed([[([1.0, 2.0], [True, True])]], {})
    for stage in (normalise_advantages, clip_advantages, normalise_across_batch):
        assert stage(stages, tokens, *rest) is tokens
    assert details == [{}]


def test_no_groups() -> None:
    assert normalised([], {**GROUP, "reward_norm_mean": "batch"}) == ([], [])
    stages, tokens, *rest = placed([], {**TOKENS, "cross_batch": "mean_std", "advantage_clip": 1.0})
    for stage in (normalise_advantages, clip_advantages, normalise_across_batch):
        assert len(stages.exact(stage(stages, tokens, *rest))) == 0


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("level", ["group", "batch"])
def test_equal_rewards_give_exactly_zero(level: str, ddof: int, leave_one_out: bool) -> None:
    for value, size in ((0.1, 2), (1 / 3, 7), (-0.7, 1000), (1e30 / 7, 3)):
        parameters = {
            "reward_norm_mean": level,
            "reward_norm_std": level,
            "reward_norm_ddof": ddof,
            "reward_norm_leave_one_out": leave_one_out,
        }
        assert normalised([[value] * size], parameters)[0] == [0.0] * size


def test_a_single_vote() -> None:
    def score(**parameters: Any) -> float:
        named = {f"reward_norm_{name}": value for name, value in parameters.items()}
        ((score,), _) = normalised([[3.0]], named)
        return score

    assert score(mean="group", std="group") == 0.0
    assert score(mean="batch", std="batch") == 0.0
    assert score(mean="group", std="group", leave_one_out=True) == 3.0 / (1 + 1e-5)
    assert score(std="group") == score(std="batch") == 3.0 / (1 + 1e-5)
    assert score(std="group", ddof=0) == 3.0 / (3.0 + 1e-5)


def test_with_turn_rewards_a_run_votes_with_its_first_step() -> None:
    members = [
        experience(9.0, [True], run="a", step=1),
        experience(1.0, [True], run="a", step=2),
        experience(2.0, [True]),
    ]
    parameters: dict[str, Any] = {"reward_norm_mean": "group", "turn_rewards": "steps"}
    batch, chosen, details = packed([members], "reinforce", **parameters)
    scores = normalise_rewards(np.array([10.0, 1.0, 2.0]), batch, chosen, details).tolist()
    assert scores == [4.0, -5.0, -4.0]
    # Left out of the mean is the run's vote, not the step.
    batch, chosen, details = packed(
        [members], "reinforce", **parameters, reward_norm_leave_one_out=True
    )
    scores = normalise_rewards(np.array([10.0, 1.0, 2.0]), batch, chosen, details).tolist()
    assert scores == [8.0, -1.0, -8.0]


def test_an_overflow_stays_with_its_experience() -> None:
    parameters = {"reward_norm_mean": "batch", "reward_norm_std": "batch"}
    scores, _ = normalised([[math.inf, -math.inf], [1.0, 3.0]], parameters)
    assert scores[:2] == [math.inf, -math.inf]
    assert scores[2:] == normalised([[1.0, 3.0]], parameters)[0]


ROWS = [
    [([0.5, math.nan, 2.0], [True, False, True]), ([4.0], [True])],
    [([], []), ([math.inf], [False]), ([7.0, -1.0], [True, True]), ([3.5], [True])],
]
VALID = [[0.5, 2.0, 4.0], [7.0, -1.0, 3.5]]
ALL_VALID = [*VALID[0], *VALID[1]]


def of_valid(stages: TokenStages, tokens: Any, batch: Batch) -> list[float]:
    """Valid tokens; the others must be zero."""
    exact = stages.exact(tokens)
    assert not exact[batch.mask == 0].any()
    valid: list[float] = exact[batch.mask != 0].tolist()
    return valid


def test_equal_advantages_give_exactly_zero() -> None:
    group = [([0.1] * 7, [True] * 7), ([0.1] * 1001, [True] * 1001)]
    for level in ("group", "batch"):
        parameters = {
            "advantage_norm_mean": level, "advantage_norm_std": level, "cross_batch": "mean_std",
        }  # fmt: skip
        stages, tokens, batch, chosen, details = placed([group], parameters)
        whitened = normalise_advantages(stages, tokens, batch, chosen, details)
        assert not stages.exact(whitened).any()
        crossed = normalise_across_batch(stages, tokens, batch, chosen, details)
        assert not stages.exact(crossed).any()
        assert details[0]["cross_batch_std"] == 1e-4


def test_a_run_alone_in_its_group_has_nothing_to_be_compared_with() -> None:
    for run in ("", "a"):
        members = [
            experience(None, [True, True], token_level_reward=[1.0, 3.0], run=run, step=step)
            for step in range(2 if run else 1)
        ]
        parameters: dict[str, Any] = {**TOKENS, "advantage_norm_leave_one_out": True}
        batch, chosen, details = packed([members], "reinforce", **parameters)
        stages = token_stages(batch, device="cpu", threads=1, precision="float64")
        rewards = stages.rewards(np.zeros(len(members)), None)
        tokens = stages.returns(rewards, gamma=0.0, mask_mode="skip")
        whitened = normalise_advantages(stages, tokens, batch, chosen, details)
        expected = [1 / (1 + 1e-8), 3 / (1 + 1e-8)] * len(members)
        assert of_valid(stages, whitened, batch) == pytest.approx(expected, rel=1e-15)


def test_whitening_without_valid_tokens() -> None:
    parameters = {**TOKENS, "advantage_clip": 1.0, "cross_batch": "mean_std"}
    stages, tokens, batch, chosen, details = placed([[([math.nan], [False])], []], parameters)
    for stage in (normalise_advantages, clip_advantages, normalise_across_batch):
        tokens = stage(stages, tokens, batch, chosen, details)
    assert stages.exact(tokens).tolist() == [0.0]
    for detail in details:
        assert detail["advantage_clip_fraction"] == 0.0
        assert all(math.isfinite(value) for value in detail.values() if isinstance(value, float))


def test_clipping_counts_what_was_strictly_outside_in_each_group() -> None:
    stages, tokens, batch, chosen, details = placed(ROWS, {"advantage_clip": 2.0})
    clipped = clip_advantages(stages, tokens, batch, chosen, details)
    assert of_valid(stages, clipped, batch) == [0.5, 2.0, 2.0, 2.0, -1.0, 2.0]
    assert details == [{"advantage_clip_fraction": 1 / 3}, {"advantage_clip_fraction": 2 / 3}]


def test_moments_are_recorded() -> None:
    _, details = normalised([[0.5, 2.0, 3.5], [-1.0, 4.0]], GROUP)
    assert details == [
        {"reward_norm_mean": 2.0, "reward_norm_std": 1.5},
        {"reward_norm_mean": 1.5, "reward_norm_std": pytest.approx(12.5**0.5, rel=1e-15)},
    ]
    left_out = {"reward_norm_mean": "group", "reward_norm_leave_one_out": True}
    assert normalised([[0.5, 2.0, 6.5]], left_out)[1] == [{"reward_norm_mean": 3.0}]
    groups = [*ROWS, [([5.0, 6.0], [True, True])]]
    for level, mean in (("group", 5.5), ("batch", statistics.mean([*ALL_VALID, 5.0, 6.0]))):
        parameters = {"advantage_norm_mean": level, "advantage_norm_std": level}
        stages, tokens, *rest = placed(groups, parameters)
        normalise_advantages(stages, tokens, *rest)
        found = rest[2]
        assert found[2]["advantage_mean"] == pytest.approx(mean, rel=1e-15)
        assert set(found[2]) == {"advantage_mean", "advantage_std"}
        assert (found[0] == found[1]) == (level == "batch")
    for how, std in (("mean", None), ("mean_std", 0.5)):
        stages, tokens, *rest = placed(groups, {"cross_batch": how}, batches=[0, 0, 1])
        normalise_across_batch(stages, tokens, *rest)
        found = rest[2]
        assert (found[2]["cross_batch_mean"], found[2].get("cross_batch_std")) == (5.5, std)
