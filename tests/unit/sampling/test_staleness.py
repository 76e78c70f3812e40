from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer_server.sampling.staleness import Age, Reason, why_stale

NOW = 1_700_000_000.0
TIGHT = {"max_lag": 3, "max_version_span": 2, "max_age_seconds": 60.0}


def why(
    low: int | None, high: int | None, seconds: float, published: int | None, **window: Any
) -> Reason:
    age = Age(min_version=low, max_version=high, push_time=NOW - seconds)
    return why_stale(age, published=published, now=NOW, **window)


@pytest.mark.parametrize(
    ("versions", "seconds", "published", "window", "reason"),
    [
        ((5, 5), 0.0, 8, {"max_lag": 3}, ""),
        ((5, 5), 0.0, 9, {"max_lag": 3}, "lag"),
        ((5, 9), 0.0, 9, {"max_lag": 3}, "lag"),
        ((5, 5), 0.0, 5, {"max_lag": 0}, ""),
        ((5, 5), 0.0, 6, {"max_lag": 0}, "lag"),
        ((5, 5), 0.0, None, {"max_lag": 3}, ""),
        ((None, None), 0.0, 99, {"max_lag": 3}, ""),
        ((None, 5), 0.0, 99, {"max_lag": 3}, ""),
        ((5, 7), 0.0, 9, {"max_version_span": 2}, ""),
        ((5, 8), 0.0, 9, {"max_version_span": 2}, "span"),
        ((5, 8), 0.0, None, {"max_version_span": 0}, "span"),
        ((None, 8), 0.0, 9, {"max_version_span": 2}, ""),
        ((5, None), 0.0, 9, {"max_version_span": 2}, ""),
        ((5, 5), 60.0, 5, {"max_age_seconds": 60}, ""),
        ((5, 5), 60.25, 5, {"max_age_seconds": 60}, "age"),
        ((None, None), 1.5, None, {"max_age_seconds": 0.5}, "age"),
        ((1, 8), 1e6, 9, {}, ""),
        ((1, 8), 1e6, 9, TIGHT, "lag"),
        ((6, 9), 1e6, 9, TIGHT, "span"),
        ((7, 9), 61.0, 9, TIGHT, "age"),
        ((8, 8), 0.0, 7, TIGHT, ""),
        ((3, 8), 0.0, 7, TIGHT, "lag"),
    ],
)
def test_vectors(
    versions: tuple[int | None, int | None],
    seconds: float,
    published: int | None,
    window: dict[str, Any],
    reason: str,
) -> None:
    assert why(*versions, seconds, published, **window) == reason


VERSION = st.none() | st.integers(0, 9)
BOUND = st.none() | st.integers(0, 5)


@given(VERSION, VERSION, VERSION, st.tuples(BOUND, BOUND, BOUND), st.integers(0, 9))
def test_a_wider_window_never_makes_a_unit_stale(
    low: int | None,
    high: int | None,
    published: int | None,
    bounds: tuple[int | None, ...],
    seconds: int,
) -> None:
    window = dict(zip(TIGHT, bounds, strict=True))
    reason = why(low, high, seconds, published, **window)
    for bound, label in zip(TIGHT, ("lag", "span", "age"), strict=True):
        other = why(low, high, seconds, published, **window | {bound: None})
        if reason == label:
            assert other != label
        else:
            assert other == reason
    assert why(low, high, seconds, published) == ""
