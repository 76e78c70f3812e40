"""What a launch does around the formulas: failures, flags, policies, records, independence."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages import (
    Column,
    EstimatorSpec,
    ExperienceInput,
    GroupFailure,
    GroupResult,
    ParameterError,
    compute,
)
from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, TokenStages
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.estimators.registry import Estimator
from experience_buffer_server.advantages.estimators.token_returns import TokenAdvantages
from experience_buffer_server.advantages.plan.parameters import (
    BatchParameters,
    GroupParameters,
    ReinforceParameters,
)
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from .builders import advantages, column, computed, failed
from .builders import experience as bare
from .builders import floats as floats_of
from .cases import full


def floats(*numbers: float) -> Column:
    return column(numbers, "F32")


def experience(reward: float | None = 1.0, *, valid: Sequence[int] = (1, 1), **fields: Any) -> Any:
    """An experience with everything that any estimator reads."""
    return dataclasses.replace(full(bare(reward, valid)), **fields)


def launch(
    groups: Sequence[Sequence[ExperienceInput]],
    estimator: str = "grpo",
    parameters: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[GroupResult | GroupFailure]:
    return compute(groups, estimator=estimator, parameters=parameters or {}, **options)


def test_groups_without_variance_are_kept_masked_or_withheld() -> None:
    equal, differing = [experience(0.7)] * 2, [experience(0.0), experience(1.0)]
    # The shift of asymre gives even equal rewards an advantage.
    kept = launch([equal, differing, equal[:1]], "asymre", {"zero_variance": "keep"})
    assert advantages(computed(kept[0]).items[0]) == pytest.approx([0.1, 0.1])
    for policy, mark in (("mask", "masked"), ("withhold", "withheld")):
        outcomes = launch([equal, differing, equal[:1]], "asymre", {"zero_variance": policy})
        found = [computed(outcome).details.get(mark) for outcome in outcomes]
        assert found == [True, None, None]
        assert computed(outcomes[0]).details["zero_variance"] is True
        assert [computed(o).items for o in outcomes[1:]] == [computed(o).items for o in kept[1:]]
        if policy == "withhold":
            assert computed(outcomes[0]).items == computed(kept[0]).items
        else:
            (first, second) = computed(outcomes[0]).items
            assert first == second
            assert bytes(first.advantages) == bytes(first.returns) == bytes(8)


def test_a_result_beyond_float32_fails_its_group_alone() -> None:
    large = experience(None, token_level_reward=floats(3e38, 3e38))
    outcomes = launch([[experience()], [experience(), large], [experience()]], "reinforce")
    error = failed(outcomes[1])
    assert error.startswith("experience 1 of the group: the result is beyond float32; push ")
    assert [outcomes[0], outcomes[2]] == launch([[experience()]] * 2, "reinforce")


@pytest.mark.parametrize("level", ["group", "batch"])
def test_what_overflows_does_not_reach_the_statistics_of_its_neighbours(level: str) -> None:
    norms = {"advantage_norm_mean": level, "advantage_norm_std": level}
    parameters = {"kl_coef": 9.0, "kl_estimator": "k2", "cross_batch": "mean_std", **norms}
    # The square is beyond float32.
    far = [experience(logprobs=floats(-1e30, 1.0)), experience(7.0)]
    good = [[experience(0.1), experience(0.9)], [experience(0.4), experience(0.2)]]
    outcomes = launch([good[0], far, good[1]], "reinforce", parameters)
    error = failed(outcomes[1])
    assert "experience 0 of the group: the result is beyond float32 with the statistics" in error
    expected = [computed(outcome) for outcome in launch(good, "reinforce", parameters)]
    found = [computed(outcomes[0]), computed(outcomes[2])]
    assert [result.items for result in found] == [result.items for result in expected]


SHARING: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {"running_norm": "mean_std"}),
    ("reinforce", {"reward_norm_mean": "batch"}),
    ("reinforce", {"cross_batch": "mean_std"}),
    ("rloo", {"running_norm": "std", "reward_norm_std": "batch", "advantage_norm_mean": "group"}),
]


@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize(("estimator", "given"), SHARING)
def test_a_group_that_fails_on_its_tokens_never_was_there(
    estimator: str, given: dict[str, Any], where: int
) -> None:
    # exp(100) as a divergence is beyond float32.
    far = [experience(100.0, logprobs=floats(-100.0, 0.0)), experience(7.0)]
    good = [[experience(1.0), experience(4.0)], [], [experience(2.0), experience(9.0)]]
    check_neighbours(estimator, {"kl_coef": 0.1, "kl_estimator": "k3", **given}, good, far, where)


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_group_that_fails_with_cpgd_never_was_there(where: int) -> None:
    far = [experience(None, token_level_reward=floats(3e38, 3e38)), experience(7.0)]
    good = [[experience(1.0), experience(4.0)], [], [experience(2.0)]]
    for weight in ("none", "clip_filter"):
        for more in ({}, {"reward_norm_mean": "batch"}, {"advantage_norm_mean": "batch"}):
            check_neighbours("cpgd", {"weight": weight, **more}, good, far, where)


def check_neighbours(
    estimator: str, parameters: Mapping[str, Any], good: list[Any], far: list[Any], where: int
) -> None:
    """A launch with and without a group that fails agree in all but that group."""
    joined, alone = RunningMoments(), RunningMoments()
    for moments in (joined, alone):
        moments.update([0.5, 3.0])
    outcomes = launch([*good[:where], far, *good[where:]], estimator, parameters, moments=joined)
    assert "experience 0 of the group: the result is beyond float32" in failed(outcomes.pop(where))
    assert outcomes == launch(good, estimator, parameters, moments=alone)
    assert all(computed(outcome) for outcome in outcomes)
    assert joined.to_json() == alone.to_json()


def test_a_launch_that_raises_leaves_the_moments() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no tokens today")

    spec = EstimatorSpec(
        name="own", compares="item", needs=("reward",), parameters=ReinforceParameters
    )
    own: dict[str, Any] = {"own": (spec, Estimator(scores=None, tokens=broken))}
    moments = RunningMoments()
    with pytest.raises(RuntimeError, match="no tokens today"):
        launch([[experience()]], "own", {"running_norm": "std"}, custom=own, moments=moments)
    assert moments.count == 0


def half_of_rewards(
    rewards_B: Floats, batch: Batch, parameters: Any, details: GroupDetails
) -> Floats:
    for own in details:
        own["halved"] = True
    halved: Floats = rewards_B / 2
    halved[rewards_B == 13.0] = math.nan
    halved[rewards_B == 14.0] = math.inf
    return halved


def spread_twice(
    stages: TokenStages, rewards_B: Floats, batch: Batch, parameters: Any
) -> TokenAdvantages:
    return TokenAdvantages(advantages=stages.spread(rewards_B), returns=stages.spread(-rewards_B))


def custom(name: str, parameters: type[BatchParameters]) -> dict[str, Any]:
    spec = EstimatorSpec(name=name, compares="item", needs=("reward",), parameters=parameters)
    return {name: (spec, Estimator(scores=half_of_rewards, tokens=spread_twice))}


def test_scores_take_the_place_of_token_level_rewards_unless_they_are_what_was_given() -> None:
    spec = EstimatorSpec(
        name="own",
        compares="item",
        needs=("reward|token_level_reward",),
        parameters=ReinforceParameters,
    )
    given = experience(None, token_level_reward=floats(1.0, 2.0))
    for scores, expected in (
        (lambda rewards_B, *_: rewards_B + 7.0, [7.0, 7.0]),
        (lambda rewards_B, *_: rewards_B, [3.0, 2.0]),
    ):
        own = {"own": (spec, Estimator(scores=scores))}
        (outcome,) = launch([[given]], "own", custom=own)
        assert advantages(computed(outcome).items[0]) == expected


@pytest.mark.parametrize("parameters", [BatchParameters, GroupParameters])
def test_an_estimator_of_ones_own(parameters: type[BatchParameters]) -> None:
    own = custom("halves", parameters)
    not_a_number = [experience(13.0, valid=[0])]
    outcomes = launch([[experience(3.0)], not_a_number], "halves", custom=own)
    result = computed(outcomes[0])
    assert advantages(result.items[0]) == [1.5, 1.5]
    assert floats_of(result.items[0].returns) == [-1.5, -1.5]
    assert result.details == {"estimator": "halves", "members": 1, "halved": True}
    assert "experience 0 of the group: the result is beyond float32" in failed(outcomes[1])
    with pytest.raises(ParameterError, match="unknown estimator 'halves'"):
        launch([], "halves")


def test_running_moments_count_what_is_computed() -> None:
    own = custom("halves", GroupParameters)
    norm = {"running_norm": "mean_std"}
    moments, expected = RunningMoments(), RunningMoments()
    expected.update([1.0])
    refused, not_a_number = [experience(None)], [experience(13.0)]
    groups = [refused, [experience(2.0)], not_a_number, [experience(4.0)], [experience(6.0)]]
    counted = [True, True, True, False, True]
    outcomes = launch(groups, "halves", norm, custom=own, moments=moments, counted=counted)
    assert [isinstance(outcome, GroupResult) for outcome in outcomes] == [
        False, True, False, True, True,
    ]  # fmt: skip
    found = [computed(outcomes[at]).details["running_count"] for at in (1, 3, 4)]
    assert found == [1, 1, 2]
    expected.update([3.0])
    assert moments.to_json() == expected.to_json()
    without_flags = RunningMoments()
    launch(groups, "halves", norm, custom=own, moments=without_flags)
    assert without_flags.count == 3


def test_scores_that_are_no_numbers_reach_no_statistics_of_their_batch() -> None:
    own = custom("halves", GroupParameters)
    norms = {"reward_norm_mean": "batch", "reward_norm_std": "batch", "reward_clip": 2.5}
    good = [[experience(2.0)], [experience(6.0)]]
    outcomes = launch([good[0], [experience(14.0)], good[1]], "halves", norms, custom=own)
    failed(outcomes.pop(1))
    expected = launch(good, "halves", norms, custom=own)
    assert [computed(o).items for o in outcomes] == [computed(o).items for o in expected]


def test_views_are_read_only_and_shared_where_returns_are_advantages() -> None:
    (item,) = computed(launch([[experience(3.0)]], "reinforce")[0]).items
    assert item.returns is item.advantages
    assert isinstance(item.advantages, memoryview)
    assert item.advantages.readonly


def test_what_follows_a_recursion_is_computed_before_rounding() -> None:
    # Rounded to float32, the return would be equal to the baseline.
    given = experience(None, token_level_reward=floats(1.0, 2.0**-24), baseline_reward=1.0)
    (outcome,) = launch([[given]], "remax", {"gamma": 0.5})
    assert advantages(computed(outcome).items[0]) == [2.0**-25, 2.0**-24 - 1.0]


def test_the_package_loads_nothing_that_computes() -> None:
    code = (
        "import sys; from experience_buffer_server import advantages; "
        "from experience_buffer_server.advantages.plan import custom; "
        "advantages.plan('gae', {}); custom.custom_spec('m', computes='scores', compares='item', "
        "needs=['reward'], parameters={'a': 1}); "
        "print([m for m in ('numpy', 'torch', 'numba', 'llvmlite') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
