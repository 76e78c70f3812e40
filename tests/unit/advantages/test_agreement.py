"""The packed computation agrees with a loop over tokens, for every estimator and stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages import ESTIMATORS, compute
from experience_buffer_server.advantages.plan.specs import plan
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from . import reference
from .builders import computed, floats
from .cases import Case, Drawer, draw_parameters

FIELDS = {
    "gae": {"values", "token_level_reward"},
    "remax": {"baseline_reward", "token_level_reward"},
    "reinforce": {"token_level_reward"},
    "reinforce_plus_plus": {"token_level_reward"},
    "cpgd": {"token_level_reward"},
    "gigpo": {"env_state_hash"},
    "on_policy_distill": {"logprobs", "teacher_logprobs"},
}
SEEDS = st.integers(0, 2**48)


def fields_for(estimator: str, parameters: Mapping[str, Any]) -> frozenset[str]:
    """What the experiences carry."""
    fields = set(FIELDS.get(estimator, set()))
    if parameters.get("kl_coef"):
        fields |= {"logprobs", "ref_logprobs"}
    return frozenset(fields)


def close(data: bytes | memoryview, expected: list[float], error: float) -> None:
    """Equal but for the rounding to float32 and what rounding in float64 grew into."""
    given = floats(bytes(data))
    assert len(given) == len(expected)
    for t, (got, wanted) in enumerate(zip(given, expected, strict=True)):
        assert abs(got - wanted) <= 6.1e-8 * abs(wanted) + error + 1e-30, (t, got, wanted, error)


def check(
    estimator: str, case: Case, parameters: Mapping[str, Any], *, batches: bool = True, **how: Any
) -> None:
    moments = RunningMoments()
    outcomes = compute(
        case.inputs,
        estimator=estimator,
        parameters=parameters,
        batches=case.batches if batches else None,
        moments=moments,
        **how,
    )
    history: list[float] = []
    rows = reference.compute(
        estimator,
        case.members,
        plan=plan(estimator, parameters),
        batches=case.batches if batches else None,
        history=history,
    )
    assert moments.count == len(history)
    assert len(outcomes) == len(rows)
    for outcome, own in zip(outcomes, rows, strict=True):
        result = computed(outcome)
        assert len(result.items) == len(own)
        for item, row in zip(result.items, own, strict=True):
            close(item.advantages, row.advantages, row.advantages_error)
            close(item.returns, row.returns, row.returns_error)
            assert item.zero_mask == (not any(row.mask))


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@settings(max_examples=10)
@given(seed=SEEDS, num_groups=st.integers(0, 4), long=st.booleans())
def test_defaults(estimator: str, seed: int, num_groups: int, long: bool) -> None:
    fields = fields_for(estimator, {})
    check(estimator, Drawer(seed, fields=fields, long=long).case(num_groups), {})


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@settings(max_examples=40)
@given(seed=SEEDS, num_groups=st.integers(1, 4), likely=st.sampled_from([0.05, 0.15, 0.4]))
def test_random_parameters(estimator: str, seed: int, num_groups: int, likely: float) -> None:
    parameters = draw_parameters(ESTIMATORS[estimator].parameters, seed, likely=likely)
    fields = fields_for(estimator, parameters)
    check(estimator, Drawer(seed, fields=fields).case(num_groups), parameters)


@settings(max_examples=25)
@given(seed=SEEDS, gamma=st.sampled_from([0.0, 0.97, 1.0]), mode=st.sampled_from(["count", "skip"]))
@pytest.mark.parametrize("estimator", ["gae", "reinforce", "remax"])
def test_long_sequences(estimator: str, seed: int, gamma: float, mode: str) -> None:
    parameters = {"gamma": gamma, "mask_mode": mode, "kl_coef": 0.1, "kl_estimator": "k3"}
    fields = fields_for(estimator, parameters)
    check(estimator, Drawer(seed, fields=fields, long=True).case(2), parameters, threads=2)


@settings(max_examples=40)
@given(seed=SEEDS, most=st.sampled_from([1.3, 3.0]))
def test_cpgd_weights_of_groups_without_variance(seed: int, most: float) -> None:
    fields = fields_for("cpgd", {})
    case = Drawer(seed, fields=fields, constant=0.6).case(5)
    check("cpgd", case, {"weight": "clip_filter", "max_weight": most}, batches=seed % 2 == 0)
