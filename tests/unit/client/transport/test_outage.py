"""What is said while no server answers, and when."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest

from experience_buffer._transport.outage import AGAIN_SECONDS, Outage
from experience_buffer.errors import BufferFullError, UnavailableError

GONE = UnavailableError("Push failed (UNAVAILABLE):\n connection refused; check that it runs")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    return Outage("trainer:50051", clock=clock)


def fail(outage: Outage, clock: Clock, delay: float, *, what: str = "push") -> None:
    """Fail, and wait until the next attempt."""
    outage.waits(what, GONE, delay=delay, seconds_left=28.0)
    clock.now += delay


def lines(caplog: Any) -> list[str]:
    """What was said since the last time."""
    found = [record.getMessage() for record in caplog.records]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    caplog.clear()
    return found


def test_a_moment_is_not_worth_a_line(outage: Outage, clock: Clock, caplog: Any) -> None:
    for delay in (0.1, 0.2, 0.3):
        fail(outage, clock, delay)
    outage.ended()
    fail(outage, clock, 0.1)
    assert lines(caplog) == []


def test_the_line_says_who_waits_for_what_and_until_when(
    outage: Outage, clock: Clock, caplog: Any
) -> None:
    for delay in (0.1, 0.2, 0.3, 0.6):
        fail(outage, clock, delay)
    [line] = lines(caplog)
    assert "no server answers at trainer:50051, for 0.6 s now: push waits for one until" in line
    assert "28 s more: Push failed (UNAVAILABLE): connection refused; check that it runs" in line


@pytest.mark.parametrize("delay", [0.8, 3.0, 5.0, 60.0])
def test_it_is_said_before_a_long_wait_and_not_after_it(
    outage: Outage, clock: Clock, caplog: Any, delay: float
) -> None:
    fail(outage, clock, delay)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("delay", [0.05, 0.5, 2.5, 5.0])
def test_it_is_said_again_every_few_seconds(
    outage: Outage, clock: Clock, caplog: Any, delay: float
) -> None:
    times = []
    for _ in range(int(60 / delay)):
        before = clock.now
        fail(outage, clock, delay)
        times += [before] * len(lines(caplog))
    assert times[0] <= 100.7
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap <= AGAIN_SECONDS for gap in gaps)
    assert len(times) <= 60 / max(AGAIN_SECONDS - delay, 2.5) + 1


def test_there_is_one_line_however_many_wait(outage: Outage, clock: Clock, caplog: Any) -> None:
    for call in range(1000):
        outage.waits(f"call {call}", GONE, delay=2.0, seconds_left=9.0)
    assert len(lines(caplog)) == 1


def test_it_is_said_when_a_server_is_back_and_once(
    outage: Outage, clock: Clock, caplog: Any
) -> None:
    outage.ended()
    fail(outage, clock, 5.0)
    lines(caplog)
    for _ in range(3):
        outage.ended()
    assert lines(caplog) == ["the server at trainer:50051 answers again, after 5.0 s"]
    fail(outage, clock, 5.0)
    assert len(lines(caplog)) == 1, "it is gone again"


def test_a_server_that_is_full_is_there(outage: Outage, clock: Clock, caplog: Any) -> None:
    full = BufferFullError("full", retry_delay_seconds=9.0)
    outage.waits("push", full, delay=9.0, seconds_left=28.0)
    assert lines(caplog) == []
