from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experience_buffer.errors import InvalidRequestError
from experience_buffer.kl import AdaptiveKLController

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"


def test_coefficients_match_lightrft() -> None:
    cases = json.loads((GOLDENS / "light_kl.json").read_text())["cases"]
    (case,) = (each for each in cases if each["fn"] == "AdaptiveKLController.update")
    given = case["inputs"]
    controller = AdaptiveKLController(
        given["init"], target=given["target"], horizon=given["horizon"]
    )
    assert controller.kl_coef == given["init"]
    for step in case["expected"]["steps"]:
        found = controller.update(step["current"], num_samples=step["n_steps"])
        assert found == controller.kl_coef == pytest.approx(step["value"], rel=1e-11)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.6, 0.5 * 1.01), (600.0, 0.5 * 1.02), (-6.0, 0.5 * 0.98), (6.0, 0.5)],
)
def test_the_reaction_is_clipped(kl: float, expected: float) -> None:
    controller = AdaptiveKLController(0.5, target=6.0, horizon=100)
    assert controller.update(kl, num_samples=10) == pytest.approx(expected)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_changes_nothing(kl: float) -> None:
    controller = AdaptiveKLController(0.5, target=6.0, horizon=100)
    with pytest.raises(ValueError, match="leave tokens without log-probabilities out"):
        controller.update(kl, num_samples=10)
    assert controller.kl_coef == 0.5


def test_it_shows_what_it_follows_and_names_what_is_no_number() -> None:
    half: Any = np.float32(0.5)
    controller = AdaptiveKLController(half, target=6, horizon=100)
    assert repr(controller) == "AdaptiveKLController(0.5, target=6, horizon=100)"
    with pytest.raises(InvalidRequestError, match=r"num_samples is 2\.5; give 0 or more"):
        controller.update(1.0, num_samples=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="horizon is '10'; give a finite number above 0"):
        AdaptiveKLController(0.5, target=6.0, horizon="10")  # type: ignore[arg-type]


def test_it_stays_above_zero() -> None:
    """LightRFT's coefficient becomes negative here, and rewards divergence from then on."""
    controller = AdaptiveKLController(0.5, target=6.0, horizon=100)
    assert controller.update(0.0, num_samples=499) == pytest.approx(0.5 * 0.002)
    with pytest.raises(ValueError, match="num_samples is 500; give 0 or more and less than 500"):
        controller.update(0.0, num_samples=500)
    with pytest.raises(ValueError, match="num_samples is -1"):
        controller.update(0.0, num_samples=-1)


@pytest.mark.parametrize(
    ("kl_coef", "target", "horizon", "reason"),
    [
        (-0.1, 6.0, 100.0, "kl_coef is -0.1"),
        (math.nan, 6.0, 100.0, "kl_coef is nan"),
        (0.1, 0.0, 100.0, "target is 0.0; give a finite number above 0"),
        (0.1, math.inf, 100.0, "target is inf"),
        (0.1, 6.0, 0.0, "horizon is 0.0"),
    ],
)
def test_bad_arguments(kl_coef: float, target: float, horizon: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AdaptiveKLController(kl_coef, target=target, horizon=horizon)
