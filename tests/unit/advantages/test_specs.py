"""Names and parameters, which a process without torch validates."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experience_buffer_server.advantages import (
    ESTIMATORS,
    ParameterError,
    estimator_spec,
    missing_fields,
    required_fields,
    validate_parameters,
)
from experience_buffer_server.advantages.registry import REGISTRY


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, experience_buffer_server.advantages as a;"
        "a.validate_parameters('gae', {'lam': 0.95});"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_spec_has_functions_and_every_function_a_spec() -> None:
    assert {spec.name for spec in ESTIMATORS.values()} == set(REGISTRY)
    for spec in ESTIMATORS.values():
        assert (REGISTRY[spec.name].scores is not None) == (spec.scope == "group")


@pytest.mark.parametrize(
    ("name", "scope", "needs"),
    [
        ("grpo", "group", ("reward",)),
        ("group_norm", "group", ("reward",)),
        ("rloo", "group", ("reward",)),
        ("reinforce", "item", ("reward|token_level_reward",)),
        ("gae", "item", ("values", "reward|token_level_reward")),
    ],
)
def test_scope_and_needs(name: str, scope: str, needs: tuple[str, ...]) -> None:
    assert estimator_spec(name).scope == scope
    assert required_fields(name) == needs


def test_missing_fields_are_met_by_either_alternative() -> None:
    assert missing_fields("gae", {"values", "token_level_reward"}) == ()
    assert missing_fields("gae", {"values", "reward"}) == ()
    assert missing_fields("gae", {"reward"}) == ("values",)
    assert missing_fields("gae", set()) == ("values", "reward|token_level_reward")
    assert missing_fields("grpo", {"token_level_reward"}) == ("reward",)


def test_defaults_are_filled_in_and_integers_become_floats() -> None:
    checked = validate_parameters("gae", {"gamma": 1})
    assert repr(checked) == "GaeParameters(gamma=1.0, mask_mode='skip', lam=1.0)"
    assert "eps=1e-06" in repr(validate_parameters("grpo", {}))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("ppo", {}, r"unknown estimator 'ppo'; choose one of grpo"),
        ("grpo", {"gamma": 1.0}, r"'grpo' has no parameter 'gamma'; it has eps"),
        ("grpo", {"eps": 0.0}, r"grpo.eps is 0.0; it must lie in \(0.0, 1.0\]"),
        ("gae", {"lam": 1.5}, r"gae.lam is 1.5; it must lie in \[0.0, 1.0\]"),
        ("gae", {"gamma": -0.1}, r"gae.gamma is -0.1"),
        ("rloo", {"gamma": float("nan")}, r"rloo.gamma is nan"),
        ("reinforce", {"gamma": True}, r"reinforce.gamma is True; give a number"),
        ("reinforce", {"gamma": "1"}, r"reinforce.gamma is '1'; give a number"),
        ("gae", {"mask_mode": "pad"}, r"gae.mask_mode is 'pad'; choose one of count, skip"),
        ("gae", {"mask_mode": 1.0}, r"gae.mask_mode is 1.0; choose one of count, skip"),
    ],
)
def test_bad_parameters_are_named(
    name: str, parameters: dict[str, float | bool | str], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        validate_parameters(name, parameters)


def test_parameter_error_is_a_value_error() -> None:
    assert issubclass(ParameterError, ValueError)
