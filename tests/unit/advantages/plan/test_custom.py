"""Estimators of the operator's own: what may be declared, and what becomes of their numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experience_buffer_server import advantages
from experience_buffer_server.advantages import (
    EstimatorSpec,
    ExperienceInput,
    GroupFailure,
    GroupResult,
    ParameterError,
    plan,
)
from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats
from experience_buffer_server.advantages.estimators.custom_functions import (
    CustomEstimatorError,
    CustomLoadError,
    load_estimators,
)
from experience_buffer_server.advantages.estimators.registry import Estimator
from experience_buffer_server.advantages.isolation import isolate
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.advantages.stages.running_moments import RunningMoments
from tests.unit.advantages.builders import computed, experience, failed, floats

PARAMETERS = {"alpha": 0.5, "count": 3, "mode": "x", "on": True}
SECTION: dict[str, Any] = {
    "computes": "scores", "compares": "group", "needs": ["reward"], "parameters": PARAMETERS,
}  # fmt: skip
GROUPS = [
    [experience(1.0, (1, 0, 1)), experience(4.0, (1, 1))],
    [experience(2.0, (0, 1)), experience(3.0, (1, 1, 1, 1, 0))],
]


class Namespace:
    """What a path may lead through."""

    @staticmethod
    def double(rewards: Floats, batch: Batch, parameters: Any) -> object:
        return rewards * 2


def scaled(rewards: Floats, batch: Batch, parameters: Any) -> object:
    assert (parameters.count, parameters.mode, parameters.on) == (3, "x", True)
    return rewards * parameters.alpha


def positions(rewards: Floats, batch: Batch, parameters: Any) -> object:
    """Each token its index among all; NaN in masked slots."""
    return np.where(batch.mask != 0, np.arange(len(batch.mask)), np.nan)


def reward_of_tokens(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return np.repeat(rewards, np.diff(batch.offsets))


def fails_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    if 7.0 in batch.rewards:
        raise KeyError("seven")
    return rewards


def tokens_fail_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return np.repeat(np.asarray(fails_on_seven(rewards, batch, parameters)), np.diff(batch.offsets))


def nan_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return np.where(rewards == 7.0, np.nan, rewards)


def nan_token_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return np.repeat(np.where(batch.rewards == 7.0, np.inf, rewards), np.diff(batch.offsets))


def huge_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return np.where(rewards == 7.0, 1.7e308, rewards)


def huge_token_on_seven(rewards: Floats, batch: Batch, parameters: Any) -> object:
    tokens = np.repeat(batch.rewards, np.diff(batch.offsets))
    return huge_on_seven(tokens, batch, parameters)


def writes(rewards: Floats, batch: Batch, parameters: Any) -> object:
    batch.mask[:] = 0
    return rewards


def short(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return rewards[:-1]


def texts(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return [str(reward) for reward in rewards]


def ragged(rewards: Floats, batch: Batch, parameters: Any) -> object:
    return [[1.0] * index for index, _ in enumerate(rewards)]


def only_alone(rewards: Floats, batch: Batch, parameters: Any) -> object:
    if len(batch.group_offsets) > 2:
        raise MemoryError
    return rewards


def two_arguments(rewards: Floats, batch: Batch) -> object:
    return rewards


NOT_CALLABLE = 3.0

Loaded = Mapping[str, tuple[EstimatorSpec, Estimator]]


def spec(**changes: Any) -> EstimatorSpec:
    return custom.custom_spec("mine", **(SECTION | changes))


def loaded(function: Callable[..., object] | str, **changes: Any) -> Loaded:
    name = function if isinstance(function, str) else function.__name__
    return load_estimators({"mine": SECTION | {"path": f"{__name__}:{name}"} | changes})


def compute(
    function: Callable[..., object] | str,
    groups: list[list[ExperienceInput]],
    *,
    given: Mapping[str, Any] | None = None,
    device: str = "cpu",
    moments: RunningMoments | None = None,
    batches: list[int] | None = None,
    **changes: Any,
) -> tuple[list[GroupResult | GroupFailure], RunningMoments | None]:
    launch = functools.partial(
        advantages.compute,
        estimator="mine",
        parameters=given or {},
        device=device,
        custom=loaded(function, **changes),
    )
    return isolate(
        launch,
        groups,
        batches=batches or list(range(len(groups))),
        counted=[True] * len(groups),
        moments=moments,
    )


def rows(outcome: GroupResult | GroupFailure) -> list[list[float]]:
    return [floats(item.advantages) for item in computed(outcome).items]


# --- what may be declared


def test_own_parameters_stand_beside_those_of_the_stages() -> None:
    described = spec()
    checked = plan("mine", {"alpha": 2, "reward_clip": 3.0}, {"mine": described}).parameters
    assert (checked.alpha, checked.mode, checked.count, checked.on) == (2.0, "x", 3, True)  # type: ignore[attr-defined]
    assert (checked.reward_clip, checked.zero_variance) == (3.0, "keep")  # type: ignore[attr-defined]
    assert described.compares == "group"
    assert plan("mine", {}, {"mine": described}).needs == ("reward",)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("alpha", "a", "mine.alpha is 'a'; give a number"),
        ("alpha", math.inf, "mine.alpha is inf"),
        ("count", 2.5, "mine.count is 2.5; give a whole number"),
        ("mode", 1.0, "mine.mode is 1.0; give a text"),
        ("on", 1, "mine.on is 1; give true or false"),
        ("beta", 1, "'mine' has no parameter 'beta'"),
    ],
)
def test_a_parameter_is_of_the_kind_of_its_default(key: str, value: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        plan("mine", {key: value}, {"mine": spec()})


@pytest.mark.parametrize("compares", ["group", "item"])
def test_a_function_of_tokens_has_no_stages_that_place_rewards(compares: str) -> None:
    """A discount that nothing applies is refused, unless the estimator declares its own."""
    described = spec(computes="tokens", compares=compares)
    with pytest.raises(ParameterError, match="no parameter 'gamma'"):
        plan("mine", {"gamma": 0.5}, {"mine": described})
    own = spec(computes="tokens", compares=compares, parameters={"gamma": 0.5})
    assert plan("mine", {}, {"mine": own}).parameters.gamma == 0.5  # type: ignore[attr-defined]
    policy = {"zero_variance": "mask"}
    if compares == "group":
        assert plan("mine", policy, {"mine": described}).scope == "group"
    else:
        with pytest.raises(ParameterError, match="no parameter 'zero_variance'"):
            plan("mine", policy, {"mine": described})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needs": []}, "name at least one of reward"),
        ({"needs": ["rewards"]}, "'rewards' asks for 'rewards'"),
        ({"needs": ["reward|valus"]}, "asks for 'valus'"),
        ({"needs": ["reward", "reward"]}, "twice"),
        ({"parameters": {"a-b": 1}}, "'a-b' can't be a parameter's name"),
        ({"parameters": {"_a": 1}}, "'_a' can't be"),
        ({"parameters": {"lambda": 1}}, "'lambda' can't be"),
        ({"parameters": {"gamma": 1.0}}, "'gamma' is taken"),
        ({"parameters": {"check": 1.0}}, "'check' is taken"),
        ({"parameters": {"estimator": "x"}}, "'estimator' is taken"),
        ({"parameters": {"zero_variance": "x"}, "compares": "item"}, "'zero_variance' is taken"),
        ({"parameters": {"a": [1]}}, r"default of 'a' is \[1\]"),
        ({"parameters": {"a": math.nan}}, "default of 'a' is nan"),
        ({"parameters": {"a": 2**53 + 1}}, "default of 'a' is 9007199254740993"),
    ],
)
def test_a_wrong_declaration_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        spec(**changes)


def test_a_built_in_estimator_cannot_be_replaced() -> None:
    with pytest.raises(ParameterError, match="'grpo' is a built-in"):
        custom.custom_spec("grpo", **SECTION)


def test_declarations_replace_those_before() -> None:
    try:
        custom.declare({"mine": spec()})
        assert list(custom.declared()) == ["mine"]
        custom.declare({"other": spec()})
        assert list(custom.declared()) == ["other"]
    finally:
        custom.declare({})
    assert not custom.declared()


# --- what is loaded


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_anywhere:f", "ModuleNotFoundError: No module named 'no_such"),
        (f"{__name__}:nothing", "AttributeError: .*nothing"),
        (f"{__name__}:NOT_CALLABLE", "of type float, which can't be called"),
        (f"{__name__}:two_arguments", "is called with three positional arguments"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_its_key(path: str, message: str) -> None:
    with pytest.raises(CustomLoadError, match=rf"^estimators\.mine\.path: .*{message}"):
        load_estimators({"mine": SECTION | {"path": path}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nraise RuntimeError('a\\nb')", r"RuntimeError: a b \(line 2 of NAME.py\)"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(line 2 of NAME.py\)"),
        ("def f(:", r"SyntaxError: .*"),
    ],
)
def test_a_module_that_fails_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    name = f"own_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CustomLoadError, match=reason.replace("NAME", name)):
        load_estimators({"mine": SECTION | {"path": f"{name}:f"}})


def test_a_path_may_lead_through_a_class() -> None:
    outcomes, _ = compute("Namespace.double", GROUPS)
    assert rows(outcomes[0]) == [[2.0, 0.0, 2.0], [8.0, 8.0]]


# --- what is computed


def test_scores_go_through_the_later_stages() -> None:
    outcomes, _ = compute(
        scaled, GROUPS, given={"alpha": 3.0, "gamma": 0.5, "mask_mode": "count", "reward_clip": 7.0}
    )
    assert rows(outcomes[0]) == [[0.75, 0.0, 3.0], [3.5, 7.0]]
    assert rows(outcomes[1]) == [[0.0, 6.0], [0.875, 1.75, 3.5, 7.0, 0.0]]
    details = computed(outcomes[0]).details
    assert details["estimator"] == "mine"
    assert details["parameters.alpha"] == 3.0
    assert "parameters.mode" not in details
    assert (details["members"], details["votes"], details["zero_variance"]) == (2, 2, False)
    assert details["reward_clip_fraction"] == 0.5


def test_an_estimator_of_items_has_no_votes() -> None:
    outcomes, _ = compute(scaled, GROUPS, compares="item")
    assert rows(outcomes[0]) == [[0.5, 0.0, 0.5], [2.0, 2.0]]
    assert "votes" not in computed(outcomes[0]).details


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("clip", [0.0, 5.0])
def test_advantages_of_tokens_are_taken_as_they_are(device: str, clip: float) -> None:
    """But for masked slots, which are zero whatever the function gave, and the later stages."""
    outcomes, _ = compute(
        positions, GROUPS, given={"advantage_clip": clip}, device=device, computes="tokens"
    )
    expected = [[0.0, 0.0, 2.0], [3.0, 4.0]], [[0.0, 6.0], [7.0, 8.0, 9.0, 10.0, 0.0]]
    bound = clip or math.inf
    assert [rows(outcome) for outcome in outcomes] == [
        [[min(value, bound) for value in row] for row in group] for group in expected
    ]
    item = computed(outcomes[1]).items[1]
    assert floats(item.returns) == expected[1][1]


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
def test_what_is_given_for_masked_slots_reaches_no_statistics(device: str) -> None:
    outcomes, _ = compute(
        positions, GROUPS[:1], given={"advantage_norm_mean": "group"}, device=device,
        computes="tokens",
    )  # fmt: skip
    assert rows(outcomes[0]) == [[-2.25, 0.0, -0.25], [0.75, 1.75]]


def test_tokens_see_shaped_rewards() -> None:
    outcomes, _ = compute(
        reward_of_tokens, GROUPS, given={"reward_scale": 2.0, "reward_clip": 5.0}, computes="tokens"
    )
    assert rows(outcomes[0]) == [[2.0, 0.0, 2.0], [5.0, 5.0]]


@pytest.mark.parametrize(
    ("function", "computes"), [(scaled, "scores"), (reward_of_tokens, "tokens")]
)
def test_policies_on_groups_without_variance_hold(
    function: Callable[..., object], computes: str
) -> None:
    equal = [experience(2.0), experience(2.0)]
    outcomes, _ = compute(
        function, [equal, GROUPS[0], equal[:1]], given={"zero_variance": "mask"}, computes=computes
    )
    assert rows(outcomes[0]) == [[0.0, 0.0], [0.0, 0.0]]
    assert computed(outcomes[0]).details["masked"]
    assert rows(outcomes[1]) != [[0.0, 0.0, 0.0], [0.0, 0.0]]
    assert [item.singleton for item in computed(outcomes[2]).items] == [True]


def variance_is_zero(group: list[ExperienceInput], **given: Any) -> object:
    needs = ["reward|token_level_reward"]
    outcomes, _ = compute(scaled, [group], given=given, needs=needs)
    return computed(outcomes[0]).details["zero_variance"]


def test_whether_rewards_are_equal_is_asked_of_what_votes() -> None:
    """Token-level rewards by their sums; returns over steps where those are compared."""
    same, other = [0.5, 1.5], [0.25, 0.25]
    assert variance_is_zero([experience(None, token_level_reward=t) for t in (same, same)])
    assert not variance_is_zero([experience(None, token_level_reward=t) for t in (same, other)])
    ends_alike, sums_alike = _runs(a=(0.0, 1.0), b=(5.0, 1.0)), _runs(a=(0.0, 1.0), b=(1.0, 0.0))
    assert variance_is_zero(ends_alike)
    assert not variance_is_zero(ends_alike, turn_rewards="steps")
    assert variance_is_zero(sums_alike, turn_rewards="steps")
    assert not variance_is_zero(sums_alike)


def _runs(**rewards: tuple[float, ...]) -> list[ExperienceInput]:
    return [
        experience(reward, run=run, step=step)
        for run, of_run in rewards.items()
        for step, reward in enumerate(of_run)
    ]


def test_unread_rewards_are_not_taken_for_equal_ones() -> None:
    """Where the reward isn't among the needs, nothing is known of its variance."""
    groups = [[experience(1.0, logprobs=[0.5, 0.5]), experience(4.0, logprobs=[0.5, 0.5])]]
    outcomes, _ = compute(scaled, groups, given={"zero_variance": "withhold"}, needs=["logprobs"])
    assert "withheld" not in computed(outcomes[0]).details


# --- what fails, and whom it touches


SEVEN = [experience(7.0), experience(0.0)]


@pytest.mark.parametrize(
    ("function", "computes", "message"),
    [
        (
            fails_on_seven,
            "scores",
            "estimator 'mine': KeyError: 'seven' .line .* of test_custom.py",
        ),
        (tokens_fail_on_seven, "tokens", "estimator 'mine': KeyError: 'seven'"),
        (nan_on_seven, "scores", "estimator 'mine' returned nan for experience 0 of the group"),
        (nan_token_on_seven, "tokens", "returned inf for experience 0 of the group"),
    ],
)
@pytest.mark.parametrize("in_one_batch", [True, False])
def test_only_the_group_it_fails_on_fails(
    function: Callable[..., object], computes: str, message: str, in_one_batch: bool
) -> None:
    """Its neighbours get what they get without it: with a batch's statistics, and moments."""
    given = {"running_norm": "mean_std", "batch_size": 5}
    given |= {"advantage_norm_mean": "batch"} if in_one_batch else {}
    others = [GROUPS[0], GROUPS[1], [experience(5.0, (1, 1, 1))]]
    mixed = [others[0], SEVEN, others[1], SEVEN[::-1], others[2]]
    outcomes, moments = compute(
        function, mixed, given=given, computes=computes, moments=RunningMoments(),
        batches=[0] * 5 if in_one_batch else None,
    )  # fmt: skip
    alone, alone_moments = compute(
        function, others, given=given, computes=computes, moments=RunningMoments(),
        batches=[0] * 3 if in_one_batch else None,
    )  # fmt: skip
    pattern = message.replace("experience 0", "experience [01]")
    for place in (1, 3):
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(failed(outcomes[place]))
    assert [rows(outcomes[place]) for place in (0, 2, 4)] == [rows(one) for one in alone]
    assert moments is not None
    assert alone_moments is not None
    assert moments.to_json() == alone_moments.to_json()
    assert moments.count == 5


@pytest.mark.parametrize(
    ("function", "computes", "norm"),
    [
        (huge_on_seven, "scores", "reward_norm_mean"),
        (huge_token_on_seven, "tokens", "advantage_norm_mean"),
    ],
)
def test_numbers_beyond_float32_reach_no_statistics(
    function: Callable[..., object], computes: str, norm: str
) -> None:
    """Sums of several would be beyond float64, too."""
    given = {norm: "batch"}
    sevens = [experience(7.0), experience(7.0)]
    outcomes, _ = compute(
        function, [*GROUPS, sevens], given=given, computes=computes, batches=[0] * 3
    )
    alone, _ = compute(function, GROUPS, given=given, computes=computes, batches=[0] * 2)
    assert [rows(outcome) for outcome in outcomes[:2]] == [rows(outcome) for outcome in alone]
    assert "returned 1.7e+308 for experience 0 of the group" in failed(outcomes[2])


@pytest.mark.parametrize(
    ("function", "computes", "message"),
    [
        (short, "scores", r"shape \(1,\); one number per experience is expected, shape \(2,\)"),
        (scaled, "tokens", r"shape \(2,\); one number per token is expected, shape \(5,\)"),
        (texts, "scores", "array of <U3; return real numbers"),
        (ragged, "scores", "estimator 'mine': ValueError: .*inhomogeneous"),
        (writes, "scores", "estimator 'mine': ValueError: .*read-only"),
    ],
)
def test_what_it_returns_is_looked_at(
    function: Callable[..., object], computes: str, message: str
) -> None:
    outcomes, _ = compute(function, GROUPS[:1], computes=computes)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed(outcomes[0]))


def test_a_function_that_cannot_take_a_whole_launch_gets_group_after_group() -> None:
    outcomes, _ = compute(only_alone, GROUPS)
    assert rows(outcomes[1]) == [[0.0, 2.0], [3.0, 3.0, 3.0, 3.0, 0.0]]


def test_a_batch_that_fails_in_company_fails_whole() -> None:
    outcomes, _ = compute(only_alone, GROUPS, given={"cross_batch": "mean"}, batches=[0, 0])
    assert [failed(outcome) for outcome in outcomes] == [
        f"estimator 'mine': MemoryError (line {only_alone.__code__.co_firstlineno + 2} of "
        "test_custom.py) (in a batch)"
    ] * 2


def test_other_failures_keep_their_own_words() -> None:
    outcomes, _ = compute(scaled, [[experience(None)], GROUPS[0]])
    assert failed(outcomes[0]).startswith("reward of experience 0 of the group is missing")
    assert computed(outcomes[1])


def test_our_own_errors_are_not_taken_for_the_operators() -> None:
    with pytest.raises(ParameterError):
        compute(scaled, GROUPS, given={"alpha": "x"})
    with pytest.raises(CustomEstimatorError):
        advantages.compute([SEVEN], estimator="mine", parameters={}, custom=loaded(fails_on_seven))
