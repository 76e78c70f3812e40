from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from experience_buffer.pacing import RolloutPacer
from experience_buffer_server.sampling.pacing import Reservations, capacity


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 9),
    st.lists(
        st.tuples(
            st.sampled_from(["start", "accept", "reject", "evict", "train"]), st.integers(1, 9)
        ),
        max_size=80,
    ),
)
def test_it_is_the_workers_formula(
    max_staleness: int, batch_size: int, max_running: int, steps: list[tuple[str, int]]
) -> None:
    """The same run, counted by a worker and by the buffer: their capacities are always equal."""
    pacer = RolloutPacer(
        batch_size, max_running=max_running or 1 << 30, max_staleness=max_staleness
    )
    reservations, stored, num_begun = Reservations(), list[str](), 0
    running = list[str]()
    for verb, count in steps:
        match verb:
            case "start":
                for _ in range(pacer.start(count)):
                    running.append(f"g{num_begun}")
                    assert reservations.reserve(running[-1], now=0.0, ttl_seconds=1.0)
                    num_begun += 1
            case "accept" if running:
                pacer.accept()
                stored.append(running.pop(0))
                assert reservations.arrived(stored[-1])
            case "reject" if running:
                pacer.reject()
                assert reservations.release(running.pop(0))
            case "evict" if stored:
                pacer.discard()
                stored.pop()
            case "train" if len(stored) >= batch_size:
                del stored[:batch_size]
                pacer.set_version(pacer.version + 1)
        places = capacity(
            max_staleness=max_staleness,
            batch_size=batch_size,
            max_running=max_running,
            num_unconsumed=len(stored),
            num_reserved=len(reservations),
        )
        assert places == pacer.capacity()


class ReservationsMachine(RuleBasedStateMachine):
    """Reservations are a dictionary of expiries."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations()
        self.model: dict[str, float] = {}
        self.now = 1000.0

    @rule(key=st.sampled_from("abcde"), ttl=st.integers(1, 9))
    def reserve(self, key: str, ttl: int) -> None:
        is_new = self.reservations.reserve(key, now=self.now, ttl_seconds=ttl)
        assert is_new == (key not in self.model)
        self.model[key] = self.now + ttl

    @rule(key=st.sampled_from("abcde"), arrives=st.booleans())
    def end(self, key: str, arrives: bool) -> None:
        end = self.reservations.arrived if arrives else self.reservations.release
        assert end(key) == (self.model.pop(key, None) is not None)

    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        expired = self.reservations.expire(self.now)
        assert sorted(expired) == sorted(k for k, t in self.model.items() if t <= self.now)
        times = [self.model.pop(key) for key in expired]
        assert times == sorted(times)

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.reservations) == len(self.model)
        assert [key for key in "abcde" if key in self.reservations] == sorted(self.model)


TestReservationsModel = ReservationsMachine.TestCase
TestReservationsModel.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_worker_that_keeps_renewing_costs_nothing() -> None:
    reservations = Reservations()
    assert reservations.reserve("other", now=0.0, ttl_seconds=500.0)
    for second in range(10_000):
        reservations.reserve("0/12", now=float(second), ttl_seconds=5.0)
    assert len(reservations._heap) <= 100
    assert reservations.expire(10_003.0) == ["other"]
    assert reservations.expire(10_004.0) == ["0/12"]


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_reservation_lasts(ttl: float) -> None:
    reservations = Reservations()
    with pytest.raises(ValueError, match=r"ttl_seconds is .*; give more than 0"):
        reservations.reserve("0/12", now=0.0, ttl_seconds=ttl)
    assert len(reservations) == 0
