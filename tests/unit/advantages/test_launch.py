"""What a launch does around the formulas: failures, flags, policies, records, independence."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages import (
    ESTIMATORS,
    Column,
    EstimatorSpec,
    ExperienceAdvantages,
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

BATCHED = ("cpgd", "reinforce_baseline", "reinforce_plus_plus")
"""Their statistics are a batch's."""
ALONE = sorted(set(ESTIMATORS) - set(BATCHED))


def floats(*numbers: float) -> Column:
    return Column("F32", struct.pack(f"<{len(numbers)}f", *numbers))


def mask(*valid: int) -> Column:
    return Column("U8", bytes(valid))


def experience(reward: float | None = 1.0, *, valid: Sequence[int] = (1, 1), **fields: Any) -> Any:
    """An experience with everything that any estimator reads."""
    zeros = floats(*([0.0] * len(valid)))
    given: dict[str, Any] = {
        "mask": mask(*valid), "values": zeros, "logprobs": zeros, "ref_logprobs": zeros,
        "teacher_logprobs": zeros, "baseline_reward": 0.0, "env_state_hash": "s",
    }  # fmt: skip
    return ExperienceInput(reward=reward, **{**given, **fields})


def launch(
    groups: Sequence[Sequence[ExperienceInput]],
    estimator: str = "grpo",
    parameters: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[GroupResult | GroupFailure]:
    return compute(groups, estimator=estimator, parameters=parameters or {}, **options)


def computed(outcome: GroupResult | GroupFailure) -> GroupResult:
    assert isinstance(outcome, GroupResult), outcome
    return outcome


def failed(outcome: GroupResult | GroupFailure) -> str:
    assert isinstance(outcome, GroupFailure), outcome
    return outcome.error


def advantages(item: ExperienceAdvantages) -> list[float]:
    return list(memoryview(bytes(item.advantages)).cast("f"))


def returns(item: ExperienceAdvantages) -> list[float]:
    return list(memoryview(bytes(item.returns)).cast("f"))


def random_experience(rng: random.Random) -> ExperienceInput:
    """Ragged, with gaps, runs, garbage where masked, and one of few states and rewards."""
    valid = [rng.choice([0, 1, 1]) for _ in range(rng.choice([0, 1, 2, 7, 40]))]

    def column(extra: int = 0) -> Column:
        numbers = [rng.gauss(0, 1) if ok else math.nan for ok in valid]
        return floats(*numbers, *[rng.gauss(0, 1) for _ in range(extra)])

    return ExperienceInput(
        reward=rng.choice([0.1, 0.7, 1.3, rng.gauss(0, 1)]),
        mask=mask(*valid),
        token_level_reward=column() if rng.random() < 0.3 else None,
        values=column(rng.randrange(2)),
        logprobs=column(),
        ref_logprobs=column(),
        teacher_logprobs=column(),
        baseline_reward=rng.gauss(0, 1),
        env_state_hash=rng.choice("xyz"),
        truncated=rng.random() < 0.5,
        num_turns=rng.choice([None, 1, 4]),
    )


def with_runs(members: list[ExperienceInput]) -> list[ExperienceInput]:
    """The first half of a group is one run."""
    half = len(members) // 2
    fields = ExperienceInput.__slots__
    as_steps = [
        ExperienceInput(**{f: getattr(m, f) for f in fields} | {"run": "a", "step": step})
        for step, m in enumerate(members[:half])
    ]
    return as_steps + members[half:]


def random_groups(seed: int) -> list[list[ExperienceInput]]:
    rng = random.Random(seed)
    sizes = [1, 0, 5, 2, 8, 1, 3]
    return [with_runs([random_experience(rng) for _ in range(size)]) for size in sizes]


EXTRA: dict[str, dict[str, Any]] = {
    "reinforce": {"turn_rewards": "steps", "turn_discount": 0.9, "kl_coef": 0.1, "gamma": 0.9},
    "gae": {"kl_coef": 0.1, "kl_estimator": "k3", "mask_mode": "count", "lam": 0.9},
    "grpo": {"advantage_norm_mean": "group", "advantage_norm_std": "group", "advantage_clip": 1},
    "rloo": {"turn_rewards": "concatenated", "turn_discount": 0.5, "overlong_penalty": 1,
             "overlong_buffer": 5, "max_response_tokens": 11},
    "dr_grpo": {"turn_rewards": "steps", "turn_discount": 0.5, "reward_norm_std": "group"},
}  # fmt: skip


@pytest.mark.parametrize("estimator", ALONE)
@pytest.mark.parametrize("with_extra", [False, True])
def test_neither_order_nor_neighbours_change_a_bit(estimator: str, with_extra: bool) -> None:
    parameters = EXTRA.get(estimator, {}) if with_extra else {}
    for seed in range(3):
        groups = random_groups(seed)
        together = [computed(o) for o in launch(groups, estimator, parameters)]
        apart = [computed(launch([group], estimator, parameters)[0]) for group in groups]
        assert together == apart
        assert [computed(o) for o in launch(groups, estimator, parameters, threads=2)] == apart
        rng = random.Random(seed)
        order = rng.sample(range(len(groups)), len(groups))
        member_orders = [rng.sample(range(len(group)), len(group)) for group in groups]
        shuffled = launch(
            [[groups[g][m] for m in member_orders[g]] for g in order], estimator, parameters
        )
        for g, outcome in zip(order, shuffled, strict=True):
            expected = tuple(apart[g].items[m] for m in member_orders[g])
            assert computed(outcome) == GroupResult(items=expected, details=apart[g].details)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_a_bad_group_costs_its_neighbours_nothing(estimator: str) -> None:
    groups = random_groups(11)
    numbers = [1] * 6 + [2]
    bad_mask = experience(mask=Column("F32", bytes(8)))
    garbage: dict[str, Any] = dict.fromkeys(
        ("values", "logprobs", "teacher_logprobs"), floats(0.0, math.nan)
    )
    bad_number = experience(**garbage)
    expected = launch(groups, estimator, batches=numbers)
    outcomes = launch(
        [[bad_mask], *groups[:3], [experience(), bad_number, experience()], *groups[3:]],
        estimator,
        batches=[0, *numbers[:3], 1, *numbers[3:]],
    )
    assert "mask of experience 0 of the group has dtype F32" in failed(outcomes.pop(0))
    middle = outcomes.pop(3)
    reads_columns = estimator in ("gae", "on_policy_distill")
    if reads_columns:
        assert "experience 1 of the group: " in failed(middle)
        assert "at a valid token is NaN" in failed(middle)
        assert outcomes == expected
    elif estimator not in BATCHED:
        computed(middle)
        assert outcomes == expected


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_empty_launches_and_groups(estimator: str) -> None:
    assert launch([], estimator) == []
    outcomes = launch([[], [experience()], []], estimator)
    assert [len(computed(outcome).items) for outcome in outcomes] == [0, 1, 0]
    (only,) = launch([[]], estimator)
    assert computed(only).details["members"] == 0


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_a_mask_without_valid_tokens_gives_zeros_and_a_flag(estimator: str) -> None:
    garbage: dict[str, Any] = dict.fromkeys(
        ("values", "logprobs", "teacher_logprobs"), floats(*[math.nan] * 3)
    )
    members = [
        experience(1.0, valid=[0] * 3, **garbage),
        experience(2.0, valid=[]),
        experience(4.0, valid=[1]),
    ]
    result = computed(launch([members], estimator)[0])
    assert [item.zero_mask for item in result.items] == [True, True, False]
    assert bytes(result.items[0].advantages) == bytes(result.items[0].returns) == bytes(12)
    assert bytes(result.items[1].advantages) == bytes(result.items[1].returns) == b""
    # It still votes: the rollout happened, only nothing of it is trained on.
    assert result.details["members"] == 3
    only = computed(launch([members[:1]], estimator)[0])
    assert bytes(only.items[0].advantages) == bytes(12)


def test_details_of_a_group_estimator() -> None:
    members = [experience(reward) for reward in (1.0, 0.0, 0.0, 1.0, 0.5)]
    result = computed(launch([members], "group_norm", {"eps": 0.25, "gamma": 1.0})[0])
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
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0]
    assert [advantages(item)[0] for item in result.items] == pytest.approx(expected)


def test_details_of_an_item_estimator_and_of_a_batch() -> None:
    assert computed(launch([[experience()]], "gae", {"lam": 0.5})[0]).details == {
        "estimator": "gae",
        "parameters.lam": 0.5,
        "members": 1,
    }
    groups = [[experience(), experience(0.0)], [experience()], [experience(None)], [experience()]]
    outcomes = launch(groups, "cpgd", batches=[0, 0, 1, 3])
    failed(outcomes.pop(2))
    found = [computed(outcome).details for outcome in outcomes]
    assert [(own["batch_groups"], own["batch_members"]) for own in found] == [
        (2, 3),
        (2, 3),
        (1, 1),
    ]


def test_scores_stand_for_token_level_rewards_in_the_stages_that_follow() -> None:
    members = [
        experience(None, token_level_reward=floats(1.0, 2.0)),
        experience(None, token_level_reward=floats(5.0, 4.0)),
    ]
    parameters = {"weight": "none", "reward_norm_std": "batch", "reward_norm_ddof": 0}
    (outcome,) = launch([members], "cpgd", parameters)
    # Sums 3 and 9 are 3 from their mean, and so is the deviation that they are divided by.
    assert [advantages(item) for item in computed(outcome).items] == [
        pytest.approx([-1.0, -1.0], rel=1e-5),
        pytest.approx([1.0, 1.0], rel=1e-5),
    ]


def test_a_single_vote_is_flagged_and_gets_its_reward() -> None:
    run = [experience(float(step), run="a", step=step) for step in range(3)]
    pair = [experience(1.0), experience(3.0)]
    for estimator, expected in (("grpo", 2.0 / (1 + 1e-6)), ("rloo", 2.0), ("dr_grpo", 2.0)):
        alone, compared = launch([run, pair], estimator)
        assert [advantages(i)[0] for i in computed(alone).items] == pytest.approx([expected] * 3)
        assert [item.singleton for item in computed(alone).items] == [True] * 3
        assert [item.singleton for item in computed(compared).items] == [False] * 2
        assert computed(alone).details["singleton"] is True


def test_a_bootstrap_value_is_used_if_truncated_and_given() -> None:
    members = [
        experience(1.0, valid=[1, 0], values=floats(0.5, 9.0, 2.0), truncated=True),
        experience(1.0, valid=[1, 0], values=floats(0.5, 9.0, 2.0)),
        experience(1.0, valid=[1, 0], values=floats(0.5, 9.0), truncated=True),
    ]
    for mode in ("count", "skip"):
        result = computed(launch([members], "gae", {"gamma": 0.5, "mask_mode": mode})[0])
        assert [advantages(i) for i in result.items] == [[1.5, 0.0], [0.5, 0.0], [0.5, 0.0]]
        assert [returns(i) for i in result.items] == [[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
        assert [i.bootstrapped for i in result.items] == [True, False, False]
    assert not any(i.bootstrapped for i in computed(launch([members], "reinforce")[0]).items)


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
    assert returns(result.items[0]) == [-1.5, -1.5]
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


def test_what_an_estimator_does_not_read_cannot_fail_it() -> None:
    odd = experience(1.0, valid=[1], values=floats(math.nan, 1, 2), token_level_reward=floats(1, 1))
    (outcome,) = launch([[odd, experience(3.0, valid=[1])]], "rloo")
    assert [advantages(item) for item in computed(outcome).items] == [[-2.0], [2.0]]
    unread = experience(math.nan, valid=[1], token_level_reward=floats(4.0))
    assert advantages(computed(launch([[unread]], "reinforce")[0]).items[0]) == [4.0]
    unused = experience(1.0, valid=[1], values=floats(0.5, math.nan))
    assert advantages(computed(launch([[unused]], "gae")[0]).items[0]) == [0.5]


def test_what_does_not_fit_raises() -> None:
    groups = [[experience()], [experience()]]
    with pytest.raises(ParameterError, match="unknown estimator"):
        launch(groups, "ppo")
    with pytest.raises(ParameterError, match="no parameter"):
        launch(groups, "grpo", {"lam": 1.0})
    with pytest.raises(ValueError, match="batches has 1 elements for 2 groups"):
        launch(groups, batches=[0])
    with pytest.raises(ValueError, match="counted has 3 elements for 2 groups"):
        launch(groups, counted=[True] * 3)
    with pytest.raises(ValueError, match="batches descend"):
        launch(groups, batches=[1, 0])


def test_the_package_loads_nothing_that_computes() -> None:
    code = (
        "import sys; from experience_buffer_server import advantages; "
        "advantages.plan('gae', {}); "
        "print([m for m in ('numpy', 'torch', 'numba', 'llvmlite') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
