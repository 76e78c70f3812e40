"""How much is done in one go follows the machine's speed, within bounds."""

from __future__ import annotations

import dataclasses
from itertools import count
from typing import Any

import pytest

from experience_buffer_server.runtime import tuning
from experience_buffer_server.runtime.tuning import TUNING, Tuning, measured_speed

COUNTS = [field.name for field in dataclasses.fields(Tuning) if field.metadata.get("scales")]


@pytest.mark.parametrize(
    ("speed", "factor"), [(1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (1e-6, 0.25), (1e6, 4.0)]
)
def test_counts_follow_the_speed(speed: float, factor: float) -> None:
    fitted = Tuning()
    fitted.fit(speed)
    for field in dataclasses.fields(Tuning):
        default: Any = field.default
        expected = default * factor if field.name in COUNTS else default
        assert getattr(fitted, field.name) == expected, field.name


def test_fitting_twice_is_fitting_once() -> None:
    fitted = Tuning()
    fitted.fit(0.5)
    fitted.fit(0.5)
    assert fitted.deleted_at_once == 1000


def test_the_best_of_several_measurements_counts() -> None:
    """All but one of them were held up by something else."""
    ends = iter([7.0, 3.0, 0.0003, 2.0, 5.0])
    now, is_end = 0.0, count()

    def clock() -> float:
        nonlocal now
        if next(is_end) % 2:
            now += next(ends)
        return now

    speed = measured_speed(clock, lambda: None)
    assert speed == pytest.approx(tuning._REFERENCE_SECONDS / 0.0003, rel=1e-6)


def test_a_real_machine_has_a_speed() -> None:
    assert 0.02 < measured_speed() < 50


def test_tests_run_with_the_defaults() -> None:
    assert Tuning() == TUNING
