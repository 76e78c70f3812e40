"""How fast something grows, and when a limit will be reached."""

from __future__ import annotations

import pytest

from experience_buffer_server.runtime.growth import Growth, seconds_until


def test_a_rate_is_that_of_the_last_minutes() -> None:
    growth = Growth()
    assert growth.per_second is None
    for second in range(0, 1000, 2):
        growth.look(float(second), 3.0 * second if second < 600 else 1800.0 + 7.0 * (second - 600))
        if second < 30:
            assert growth.per_second is None, "so little time says nothing"
        if second == 500:
            assert growth.per_second == pytest.approx(3.0)
    assert growth.per_second == pytest.approx(7.0)


def test_what_shrinks_or_stands_still_never_gets_there() -> None:
    growth = Growth()
    for second in range(0, 60, 6):
        growth.look(float(second), -5.0 * second)
    assert growth.per_second == pytest.approx(-5.0)
    assert seconds_until(100.0, growth.per_second) is None
    assert seconds_until(100.0, 0.0) is None
    assert seconds_until(100.0, None) is None
    assert seconds_until(100.0, 4.0) == 25.0
    assert seconds_until(-1.0, 4.0) == 0.0
    assert seconds_until(1e12, 1.0) is None, "thousands of years"
