from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer_server.sampling.staleness import Age, Verdict, Window, judge

NOW = 1_700_000_000.0
FRESH = Verdict("fresh", "", "")
TIGHT = Window(max_lag=3, max_version_span=2, max_age_seconds=60.0)


def aged(low: int | None, high: int | None, seconds: float = 0.0) -> Age:
    return Age(min_version=low, max_version=high, push_time=NOW - seconds)


def at(age: Age, window: Window | None, published: int | None, *, hold: bool = True) -> Verdict:
    return judge(age, window, published=published, now=NOW, hold_future=hold)


@pytest.mark.parametrize(
    ("age", "window", "published", "reason", "label"),
    [
        (aged(5, 5), Window(max_lag=3), 8, "", ""),
        (aged(5, 5), Window(max_lag=3), 9, "lag 4 exceeds max_lag 3", "lag"),
        (aged(5, 9), Window(max_lag=3), 9, "lag 4 exceeds max_lag 3", "lag"),
        (aged(5, 5), Window(max_lag=0), 5, "", ""),
        (aged(5, 5), Window(max_lag=0), 6, "lag 1 exceeds max_lag 0", "lag"),
        (aged(5, 5), Window(max_lag=3), None, "", ""),
        (aged(None, None), Window(max_lag=3), 99, "", ""),
        (aged(None, 5), Window(max_lag=3), 99, "", ""),
        (aged(5, 7), Window(max_version_span=2), 9, "", ""),
        (
            aged(5, 8),
            Window(max_version_span=2),
            9,
            "versions 5 to 8 exceed max_version_span 2",
            "span",
        ),
        (
            aged(5, 8),
            Window(max_version_span=0),
            None,
            "versions 5 to 8 exceed max_version_span 0",
            "span",
        ),
        (aged(None, 8), Window(max_version_span=2), 9, "", ""),
        (aged(5, None), Window(max_version_span=2), 9, "", ""),
        (aged(5, 5, 60.0), Window(max_age_seconds=60), 5, "", ""),
        (
            aged(5, 5, 60.25),
            Window(max_age_seconds=60),
            5,
            "age 60.25 s exceeds max_age_seconds 60",
            "age",
        ),
        (
            aged(None, None, 1.5),
            Window(max_age_seconds=0.5),
            None,
            "age 1.5 s exceeds max_age_seconds 0.5",
            "age",
        ),
        (aged(1, 8, 1e6), Window(), 9, "", ""),
        (aged(1, 8, 1e6), None, 9, "", ""),
        (aged(1, 8, 1e6), TIGHT, 9, "lag 8 exceeds max_lag 3", "lag"),
        (aged(6, 9, 1e6), TIGHT, 9, "versions 6 to 9 exceed max_version_span 2", "span"),
        (aged(7, 9, 61.0), TIGHT, 9, "age 61.0 s exceeds max_age_seconds 60.0", "age"),
    ],
)
def test_vectors(
    age: Age, window: Window | None, published: int | None, reason: str, label: str
) -> None:
    verdict = at(age, window, published)
    assert verdict == ("stale" if label else "fresh", reason, label)


@pytest.mark.parametrize("window", [None, Window(), TIGHT])
def test_the_future_is_judged_first(window: Window | None) -> None:
    age = aged(1, 8, 1e6)
    reason = "version 8 is newer than the published version 7"
    assert at(age, window, 7) == ("future", reason, "future")
    assert at(age, window, 8).kind != "future"
    assert at(age, window, None).kind != "future"
    assert at(age, window, 0).kind == "future"
    assert at(age, window, 7, hold=False).kind != "future"
    assert at(aged(8, None, 1e6), None, 7) == FRESH


def test_a_future_that_is_not_held_is_judged_by_the_window() -> None:
    assert at(aged(8, 8), TIGHT, 7, hold=False) == FRESH
    assert at(aged(3, 8), TIGHT, 7, hold=False).label == "lag"


VERSION = st.none() | st.integers(0, 9)
BOUND = st.none() | st.integers(0, 5)


@given(VERSION, VERSION, VERSION, BOUND, BOUND, BOUND, st.integers(0, 9), st.booleans())
def test_a_wider_window_never_makes_a_unit_stale(
    low: int | None,
    high: int | None,
    published: int | None,
    max_lag: int | None,
    max_span: int | None,
    max_age: int | None,
    seconds: int,
    hold: bool,
) -> None:
    age = aged(low, high, seconds)
    window = Window(max_lag=max_lag, max_version_span=max_span, max_age_seconds=max_age)
    verdict = at(age, window, published, hold=hold)
    assert bool(verdict.reason) == bool(verdict.label) == (verdict.kind != "fresh")
    without = {
        "lag": Window(max_version_span=max_span, max_age_seconds=max_age),
        "span": Window(max_lag=max_lag, max_age_seconds=max_age),
        "age": Window(max_lag=max_lag, max_version_span=max_span),
    }
    for label, wider in without.items():
        other = at(age, wider, published, hold=hold)
        if verdict.kind == "stale" and verdict.label == label:
            assert other.label != label
        else:
            assert other == verdict
    assert at(age, None, published, hold=False) == FRESH
