"""Names, parameters, scopes and needs, which a process without NumPy and torch validates."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.advantages import (
    ESTIMATORS,
    EstimatorSpec,
    ParameterError,
    estimator_spec,
)
from experience_buffer_server.advantages.plan.parameters import ReinforceParameters
from experience_buffer_server.advantages.plan.specs import INPUT_FIELDS, plan


def test_names() -> None:
    assert set(ESTIMATORS) == {
        "grpo", "group_norm", "dr_grpo", "rloo", "reinforce_baseline", "opmd", "asymre",
        "step_wise_grpo", "gigpo", "cpgd", "reinforce", "reinforce_plus_plus", "remax", "gae",
        "on_policy_distill",
    }  # fmt: skip
    assert estimator_spec("group_norm") is estimator_spec("grpo")
    with pytest.raises(ParameterError, match="unknown estimator 'ppo'; choose one of grpo"):
        estimator_spec("ppo")


def test_an_own_estimator_joins_the_known_ones() -> None:
    own = EstimatorSpec(
        name="mine", compares="item", needs=("values",), parameters=ReinforceParameters
    )
    assert estimator_spec("mine", {"mine": own}) is own
    assert plan("mine", {"gamma": 0.5}, {"mine": own}).needs == ("values",)
    with pytest.raises(ParameterError, match=r"choose one of .*mine"):
        estimator_spec("other", {"mine": own})


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        *[
            (name, ("reward",))
            for name in (
                "grpo", "group_norm", "dr_grpo", "rloo", "reinforce_baseline", "opmd", "asymre",
                "step_wise_grpo",
            )
        ],
        ("gigpo", ("reward", "env_state_hash")),
        ("cpgd", ("reward|token_level_reward",)),
        ("reinforce", ("reward|token_level_reward",)),
        ("reinforce_plus_plus", ("reward|token_level_reward",)),
        ("remax", ("baseline_reward", "reward|token_level_reward")),
        ("gae", ("values", "reward|token_level_reward")),
        ("on_policy_distill", ("teacher_logprobs", "logprobs")),
    ],
)  # fmt: skip
def test_needs(name: str, needs: tuple[str, ...]) -> None:
    assert plan(name, {}).needs == needs
    assert {field for need in needs for field in need.split("|")} <= set(INPUT_FIELDS)
    if name not in ("on_policy_distill", "cpgd"):
        assert plan(name, {"kl_coef": 0.1}).needs == (*needs, "logprobs", "ref_logprobs")


GROUPED = {
    "grpo", "group_norm", "dr_grpo", "rloo", "reinforce_baseline", "opmd", "asymre",
    "step_wise_grpo", "gigpo",
}  # fmt: skip


def test_scopes() -> None:
    assert {name for name in ESTIMATORS if plan(name, {}).scope == "group"} == GROUPED


@pytest.mark.parametrize(
    "given",
    [
        {"reward_norm_mean": "group"},
        {"reward_norm_std": "group"},
        {"advantage_norm_mean": "group"},
        {"advantage_norm_std": "group"},
        {"turn_rewards": "steps"},
    ],
)
@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - GROUPED - {"on_policy_distill"}))
def test_parameters_may_need_groups(name: str, given: dict[str, Any]) -> None:
    assert plan(name, given).scope == "group"


def test_cpgd_counts_groups_for_its_weight() -> None:
    assert plan("cpgd", {"weight": "clip_filter"}).scope == "group"
    assert plan("cpgd", {"weight": "none", "turn_rewards": "concatenated"}).scope == "item"


@pytest.mark.parametrize(
    ("name", "given", "batch", "running"),
    [
        ("grpo", {}, False, False),
        ("reinforce", {"cross_batch": "mean"}, True, False),
        ("reinforce", {"reward_norm_std": "batch"}, True, False),
        ("gae", {"advantage_norm_mean": "batch"}, True, False),
        ("gae", {"advantage_norm_mean": "group", "running_norm": "std"}, False, True),
        ("cpgd", {}, True, False),
        ("reinforce_baseline", {}, True, False),
        ("reinforce_plus_plus", {}, True, False),
        ("on_policy_distill", {}, False, False),
        ("on_policy_distill", {"cross_batch": "mean_std"}, True, False),
    ],
)
def test_statistics_by_parameters(
    name: str, given: dict[str, Any], batch: bool, running: bool
) -> None:
    parameters = plan(name, given).parameters
    assert (parameters.uses_batch, parameters.uses_running_moments) == (batch, running)


def test_integers_become_floats_and_whole_floats_counts() -> None:
    parameters: Any = plan("gae", {"gamma": 1, "batch_size": 7.0}).parameters
    assert (repr(parameters.gamma), repr(parameters.batch_size)) == ("1.0", "7")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("grpo", {"lam": 1.0}, r"estimator 'grpo' has no parameter 'lam'; it has .*eps, gamma"),
        ("on_policy_distill", {"kl_coef": 1.0}, r"has no parameter 'kl_coef'"),
        ("cpgd", {"kl_coef": 1.0}, r"has no parameter 'kl_coef'"),
        ("cpgd", {"gamma": 1.0}, r"has no parameter 'gamma'"),
        ("grpo", {"eps": 0.0}, r"grpo.eps is 0.0; it must lie in \[1e-30, 1.0\]"),
        ("gigpo", {"eps": 5e-324}, r"gigpo.eps is 5e-324; it must lie in \[1e-30, 1.0\]"),
        ("gae", {"lam": 1.5}, r"gae.lam is 1.5; it must lie in \[0.0, 1.0\]"),
        ("gae", {"gamma": -0.1}, r"gae.gamma is -0.1"),
        ("rloo", {"gamma": float("nan")}, r"rloo.gamma is nan"),
        ("rloo", {"reward_clip": float("inf")}, r"rloo.reward_clip is inf"),
        ("rloo", {"kl_coef": -1}, r"rloo.kl_coef is -1"),
        ("opmd", {"tau": 0}, r"opmd.tau is 0; it must lie in \("),
        ("reinforce", {"gamma": True}, r"reinforce.gamma is True; give a number"),
        ("reinforce", {"gamma": "1"}, r"reinforce.gamma is '1'; give a number"),
        ("gae", {"mask_mode": "pad"}, r"gae.mask_mode is 'pad'; choose one of count, skip"),
        ("gae", {"mask_mode": 1.0}, r"gae.mask_mode is 1.0; choose one of count, skip"),
        ("gae", {"cross_batch": True}, r"gae.cross_batch is True; choose one of none, mean"),
        ("gigpo", {"use_std": 1}, r"gigpo.use_std is 1; give true or false"),
        ("gae", {"advantage_norm_ddof": 2}, r"gae.advantage_norm_ddof is 2"),
        ("gae", {"advantage_norm_ddof": 0.5}, r"ddof is 0.5; give a whole number"),
        ("gae", {"batch_size": 0}, r"gae.batch_size is 0; it must lie in \[1, 65536\]"),
        ("gae", {"overlong_penalty": 1.0}, r"overlong_penalty needs overlong_buffer and max_res"),
        (
            "gae",
            {"overlong_penalty": 1.0, "overlong_buffer": 4},
            r"overlong_penalty needs|overlong_buffer 4 exceeds",
        ),
        (
            "grpo",
            {"overlong_penalty": 1.0, "overlong_buffer": 17, "max_response_tokens": 13},
            r"overlong_buffer 17 exceeds max_response_tokens 13",
        ),
        ("grpo", {"gama": 0.5}, r"no parameter 'gama'; did you mean 'gamma'\? Its own are eps$"),
        ("reinforce", {"lamb": 0.5}, r"no parameter 'lamb'; it has .*gamma"),
        ("grpo", {"turn_discount": 0.5}, "turn_discount is 0.5, .* while turn_rewards is 'none'"),
        ("rloo", {"kl_estimator": "k3"}, "kl_estimator is 'k3', .* while kl_coef is 0.0; set kl_"),
        ("gae", {"kl_clip": 10.0, "kl_coef": 0}, "kl_clip is 10.0, which .* kl_coef is 0.0"),
        ("gae", {"reward_norm_ddof": 0}, "reward_norm_ddof is 0, .*_mean is 'none' and reward_nor"),
        (
            "cpgd",
            {"reward_norm_eps": 1},
            "reward_norm_eps is 1.0, .*_mean is 'none' and reward_nor",
        ),
        ("gae", {"reward_norm_leave_one_out": True}, "_leave_one_out is True, .*reward_norm_std"),
        ("gae", {"advantage_norm_eps": 0.5}, "_eps is 0.5, .* advantage_norm_mean is 'none' and"),
        ("on_policy_distill", {"advantage_norm_ddof": 0}, "ddof is 0, .* advantage_norm_std is"),
        (
            "reinforce_baseline",
            {
                "advantage_norm_mean": "none",
                "advantage_norm_std": "none",
                "advantage_norm_leave_one_out": True,
            },
            "advantage_norm_leave_one_out is True, which has no effect",
        ),
        ("opmd", {"tau": 2}, "tau is 2.0, which has no effect while baseline is 'mean'"),
        (
            "grpo",
            {"max_response_tokens": 9},
            "max_response_tokens is 9, .* overlong_penalty is 0.0",
        ),
        (
            "grpo",
            {"max_response_tokens": 9, "overlong_buffer": 2},
            "overlong_buffer is 2, which has no effect while overlong_penalty is 0.0",
        ),
        ("grpo", {"reward_scale": 0}, "reward_scale is 0, which makes all rewards equal"),
        ("cpgd", {"batch_size": 1}, "batch_size is 1, so cpgd would compare each sequence with"),
    ],
)
def test_bad_parameters_are_named(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        plan(name, parameters)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("grpo", {"turn_discount": 1.0, "kl_estimator": "k1", "kl_clip": 0, "reward_norm_ddof": 1}),
        ("grpo", {"turn_rewards": "steps", "turn_discount": 0.5}),
        ("gae", {"kl_coef": 0.1, "kl_estimator": "k3", "kl_clip": 10}),
        ("gae", {"reward_norm_std": "group", "reward_norm_leave_one_out": True}),
        ("reinforce_baseline", {"advantage_norm_eps": 0.5}),
        ("reinforce_plus_plus", {"advantage_norm_mean": "none", "advantage_norm_ddof": 0}),
        ("opmd", {"baseline": "logavgexp", "tau": 2}),
        ("opmd", {"tau": 1}),
        ("cpgd", {"batch_size": 1, "weight": "clip_filter"}),
        ("cpgd", {"batch_size": 2, "eps": 1e-30}),
        ("reinforce", {"batch_size": 1}),
    ],
)
def test_parameters_with_an_effect_or_their_default_are_accepted(
    name: str, parameters: dict[str, Any]
) -> None:
    for key, value in parameters.items():
        assert getattr(plan(name, parameters).parameters, key) == value


def test_parameter_error_is_a_value_error() -> None:
    assert issubclass(ParameterError, ValueError)
