from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer.pacing import RolloutCounts, RolloutPacer

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
Case = dict[str, Any]


def traces() -> list[Any]:
    cases = json.loads((GOLDENS / "areal_staleness.json").read_text())["cases"]
    chosen = [pytest.param(c, id=c["name"]) for c in cases if c["fn"] == "StalenessManager"]
    assert len(chosen) == 2
    return chosen


def pacer_of(case: Case, *, version: int = 0) -> RolloutPacer:
    inputs = case["inputs"]
    return RolloutPacer(
        inputs["consumer_batch_size"],
        max_running=inputs["max_concurrent_rollouts"],
        max_staleness=inputs["max_staleness"],
        version=version,
    )


@pytest.mark.parametrize("case", traces())
def test_it_replays_areals_traces(case: Case) -> None:
    pacer = pacer_of(case)
    first, *steps = case["expected"]["trace"]
    assert (pacer.capacity(), pacer.max_pending) == (first["capacity"], first["pending_limit"])
    for step in steps:
        match step["op"]:
            case "submit":
                assert pacer.start() == 1
            case "accept":
                pacer.accept()
            case "reject":
                pacer.reject()
            case "version":
                pacer.set_version(step["version"])
            case op:
                assert op == "noop"
        counts = pacer.counts()
        assert {
            "op": step["op"],
            "version": pacer.version,
            "capacity": pacer.capacity(),
            "running": counts.running,
            "accepted": counts.accepted,
            "rejected": counts.rejected,
        } == step


@pytest.mark.parametrize("case", traces())
def test_a_restart_at_a_version(case: Case) -> None:
    """AReaL's fresh manager at version 37 forgets what 37 versions consumed, and lets 148 start.

    A pacer that is told its version at the start has AReaL's recovered capacity; the fresh one is
    what is right only where nothing was accepted in all 37 versions.
    """
    assert pacer_of(case, version=37).capacity() == case["expected"]["capacity_v37_recovered"]
    pacer = pacer_of(case)
    pacer.set_version(37)
    assert pacer.capacity() == case["expected"]["capacity_v37_fresh"]


def test_no_more_start_than_there_is_room_for() -> None:
    pacer = RolloutPacer(5, max_running=3, max_staleness=0)
    assert pacer.start(7) == 3
    assert pacer.start() == 0
    pacer.accept(3)
    assert pacer.start(7) == 2
    assert pacer.start(0) == 0


def test_after_a_rollback_the_capacity_is_not_negative() -> None:
    """AReaL's is negative here, which a caller must not take for a number to start."""
    pacer = RolloutPacer(2, max_running=7, max_staleness=0, version=3)
    assert pacer.start(2) == 2
    pacer.set_version(1)
    assert pacer.capacity() == 0
    assert pacer.start(1) == 0


def test_what_is_discarded_makes_room() -> None:
    """In AReaL an accepted rollout that no batch gets keeps its place for good."""
    pacer = RolloutPacer(3, max_running=7, max_staleness=0)
    pacer.start(3)
    pacer.accept(3)
    assert pacer.capacity() == 0
    pacer.discard(2)
    assert pacer.capacity() == 2
    assert pacer.counts() == RolloutCounts(running=0, accepted=1, rejected=2)


def test_threads_never_get_the_same_place() -> None:
    pacer = RolloutPacer(1009, max_running=2003, max_staleness=0)
    with ThreadPoolExecutor(8) as pool:
        started = sum(pool.map(lambda _: pacer.start(), range(1511)))
    assert started == pacer.counts().running == 1009


@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["start", "accept", "reject", "train"]), st.integers(1, 3))),
)
def test_no_rollout_is_trained_on_too_late(
    batch_size: int, max_running: int, max_staleness: int, steps: list[tuple[str, int]]
) -> None:
    """A trainer that takes rollouts in the order they were started finds none too stale."""
    pacer = RolloutPacer(batch_size, max_running=max_running, max_staleness=max_staleness)
    version = 0
    running: list[int] = []
    accepted: list[int] = []
    for step, count in steps:
        if step == "start":
            running += [version] * pacer.start(count)
            assert len(running) <= max_running
        elif step == "train":
            if len(accepted) >= batch_size:
                batch, accepted = accepted[:batch_size], accepted[batch_size:]
                assert version - min(batch) <= max_staleness
                version += 1
                pacer.set_version(version)
        elif running:
            oldest = running.pop(0)
            if step == "accept":
                pacer.accept()
                accepted.append(oldest)
            else:
                pacer.reject()


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("max_running", 0), ("max_staleness", -1), ("version", -1)],
)
def test_bad_bounds(name: str, value: int) -> None:
    bounds = {"batch_size": 1, "max_running": 1, "max_staleness": 0} | {name: value}
    with pytest.raises(
        ValueError, match=f"{name} is {value}; give a whole number of at least {value + 1}"
    ):
        RolloutPacer(**bounds)


@pytest.mark.parametrize(
    ("method", "count", "reason"),
    [
        ("accept", 3, r"3 rollouts can't end: 2 running; start\(\) first"),
        ("reject", 3, "2 running"),
        ("discard", 2, "2 rollouts can't be discarded: 1 accepted"),
        ("accept", -1, "count is -1; give a whole number of at least 0"),
        ("reject", -1, "count is -1"),
        ("discard", -1, "count is -1"),
        ("start", -1, "wanted is -1"),
        ("set_version", -1, "version is -1"),
        ("set_version", "3", "version is '3'"),
        ("start", 1.5, "wanted is 1.5; give a whole number"),
    ],
)
def test_counts_that_cannot_be(method: str, count: Any, reason: str) -> None:
    """AReaL's counts become negative instead, which makes room for ever more rollouts."""
    pacer = RolloutPacer(7, max_running=7, max_staleness=0)
    pacer.start(3)
    pacer.accept()
    before = pacer.counts()
    with pytest.raises(ValueError, match=reason):
        getattr(pacer, method)(count)
    assert pacer.counts() == before == RolloutCounts(running=2, accepted=1, rejected=0)
