"""The series of a deleted buffer end with it, and only they."""

from __future__ import annotations

import pytest
from prometheus_client import Counter, generate_latest

from experience_buffer_server.runtime.metrics import Metrics


def fill(metrics: Metrics, buffer: str) -> None:
    metrics.pushed(buffer, "stored", "", 1)
    metrics.pushed_bytes(buffer, 10)
    metrics.sampled(buffer, "trainer", num_bytes=1, ages=[1.0], staleness=[1])
    metrics.waited(buffer, "trainer", {"": 1.0})
    metrics.advantages(buffer, [{"masked": True, "reward_clip_fraction": 0.5}])


def series_of(metrics: Metrics, buffer: str) -> int:
    families = metrics.registry.collect()
    return sum(s.labels.get("buffer") == buffer for family in families for s in family.samples)


def test_they_end_with_their_buffer_and_begin_anew() -> None:
    metrics = Metrics()
    fill(metrics, "a")
    fill(metrics, "b")
    fill(metrics, "b")
    metrics.rpc_started("unary", "service", "b")
    count = series_of(metrics, "a")
    assert count > 20
    metrics.forget_buffer("b")
    assert (series_of(metrics, "a"), series_of(metrics, "b")) == (count, 0)
    assert 'grpc_method="b"' in generate_latest(metrics.registry).decode(), "it isn't a buffer"
    fill(metrics, "b")
    value = metrics.registry.get_sample_value(
        "experience_buffer_pushed_bytes_total", {"buffer": "b"}
    )
    assert (series_of(metrics, "b"), value) == (count, 10)


def test_the_end_of_one_looks_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    fill(metrics, "a")
    fill(metrics, "b")

    def looked(_: Counter) -> None:
        pytest.fail("all series are looked at")

    monkeypatch.setattr(Counter, "collect", looked)
    metrics.forget_buffer("b")
    metrics.forget_buffer("unknown")
