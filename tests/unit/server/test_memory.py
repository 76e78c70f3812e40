"""The garbage collector leaves alone what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from experience_buffer_server.memory import calm_collector


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_is_not_looked_through_again() -> None:
    young, middle, _ = gc.get_threshold()
    kept: list[list[object]] = [[] for _ in range(1009)]
    before = gc.get_freeze_count()
    calm_collector()
    assert gc.get_freeze_count() - before >= len(kept)
    assert gc.get_threshold() == (young, middle, 10_000)


def test_cycles_of_later_are_still_found() -> None:
    calm_collector()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
