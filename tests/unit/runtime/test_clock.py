"""Time for leases and deadlines: it follows no jump of the wall clock."""

from __future__ import annotations

import math
import time

import pytest

from experience_buffer_server.runtime import clock as steady_clock
from experience_buffer_server.runtime.clock import SteadyClock


def test_it_begins_with_the_wall_clock() -> None:
    assert steady_clock.now() == pytest.approx(time.time(), abs=5.0)


def test_it_goes_on_by_what_has_elapsed_alone() -> None:
    clock = SteadyClock(wall_time=1_000_003.0, elapsed=17.0)
    assert clock.now(17.0) == 1_000_003.0
    assert clock.now(47.5) == 1_000_033.5


def test_it_is_never_before_what_has_happened() -> None:
    clock = SteadyClock(wall_time=1009.0, elapsed=0.0)
    assert clock.not_before(1013.0, 1.0) == 3.0
    assert clock.now(1.0) == 1013.0
    assert clock.now(8.0) == 1020.0
    assert clock.not_before(1019.0, 8.0) == 0.0, "that has passed anyway"
    assert clock.now(8.0) == 1020.0


@pytest.mark.parametrize("instant", [math.nan, math.inf, -math.inf])
def test_it_goes_by_no_instant_that_is_none(instant: float) -> None:
    clock = SteadyClock(wall_time=1009.0, elapsed=0.0)
    assert clock.not_before(instant, 2.0) == 0.0
    assert clock.now(2.0) == 1011.0
