"""Which functions compute which estimator."""

from __future__ import annotations

from experience_buffer_server.advantages import ESTIMATORS
from experience_buffer_server.advantages.estimators.registry import REGISTRY


def test_every_estimator_has_its_functions() -> None:
    assert set(REGISTRY) == set(ESTIMATORS)
    for name, spec in ESTIMATORS.items():
        compares = spec.compares == "group" or name == "cpgd"
        assert (REGISTRY[name].scores is not None) == compares
