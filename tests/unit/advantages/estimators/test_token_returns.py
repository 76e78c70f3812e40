"""The last step of each estimator asks the device for the right thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from experience_buffer_server.advantages import ESTIMATORS, ExperienceInput, plan
from experience_buffer_server.advantages.estimators.registry import (
    REGISTRY,
    Estimator,
    estimator_functions,
)
from experience_buffer_server.advantages.kernels.devices import token_stages
from experience_buffer_server.advantages.packing import pack
from experience_buffer_server.advantages.plan.specs import EstimatorSpec
from tests.unit.advantages.builders import experience
from tests.unit.advantages.devices import DEVICES

MASK = [True, False, True, True, False]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def computed(
    members: Sequence[ExperienceInput],
    estimator: str,
    rewards: Sequence[float],
    device: str,
    **parameters: Any,
) -> tuple[list[float], list[float], bool]:
    """Advantages, returns, and whether they are one and the same."""
    planned = plan(estimator, parameters)
    batch = pack([members], planned, batches=None)
    assert not batch.problems
    stages = token_stages(batch, device=device, threads=1, precision="float64")
    tokens = estimator_functions(planned.spec).tokens(
        stages, np.array(rewards), batch, planned.parameters
    )
    advantages, returns = (
        np.asarray(stages.exact(t)).tolist() for t in (tokens.advantages, tokens.returns)
    )
    return advantages, returns, tokens.advantages is tokens.returns


def test_returns_are_the_advantages_of_reinforce(device: str) -> None:
    member = experience(7.0, MASK)
    for mode, early in (("skip", 0.25), ("count", 0.125)):
        advantages, returns, same = computed(
            [member], "reinforce", [2.0], device, gamma=0.5, mask_mode=mode
        )
        assert advantages == returns == [2 * early, 0.0, 1.0, 2.0, 0.0]
        assert same


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_plus_plus", "rloo", "grpo", "gigpo"])
def test_without_a_discount_every_token_gets_the_reward(estimator: str, device: str) -> None:
    members = [experience(7.0, MASK, env_state_hash="s"), experience(7.0, [], env_state_hash="s")]
    advantages, _, same = computed(members, estimator, [0.1, 3.0], device)
    assert advantages == [0.1, 0.0, 0.1, 0.1, 0.0]
    assert same


def test_every_estimator_has_its_functions() -> None:
    assert set(REGISTRY) == set(ESTIMATORS)
    for name, spec in ESTIMATORS.items():
        functions = estimator_functions(spec)
        assert functions is REGISTRY[name]
        compares = spec.compares == "group" or name == "cpgd"
        assert (functions.scores is not None) == compares


def test_functions_of_the_operators_own() -> None:
    spec = EstimatorSpec(
        name="mine", compares="item", needs=("reward",), parameters=ESTIMATORS["gae"].parameters
    )
    own = Estimator()
    assert estimator_functions(spec, {"mine": own}) is own
    assert estimator_functions(ESTIMATORS["gae"], {"gae": own}) is REGISTRY["gae"]
    with pytest.raises(KeyError, match="mine"):
        estimator_functions(spec)
