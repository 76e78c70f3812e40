"""The garbage collector leaves alone what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from experience_buffer_server.memory import calm_collector, loading


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
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


def test_what_is_loaded_is_left_out_from_the_first_moment() -> None:
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        kept: list[list[object]] = [[] for _ in range(1013)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - before >= len(kept)


def test_the_collector_goes_on_after_loading_failed() -> None:
    with pytest.raises(ValueError, match="damaged"), loading():
        raise ValueError("damaged")
    assert gc.isenabled()
