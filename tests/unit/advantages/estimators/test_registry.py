"""Which functions compute which estimator."""

from __future__ import annotations

import pytest

from experience_buffer_server.advantages import ESTIMATORS
from experience_buffer_server.advantages.estimators.registry import (
    REGISTRY,
    Estimator,
    estimator_functions,
)
from experience_buffer_server.advantages.plan.specs import EstimatorSpec


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
