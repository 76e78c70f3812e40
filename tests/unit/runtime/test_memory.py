"""The garbage collector leaves alone what stays, and what doesn't stay leaves the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer_server.runtime.memory import calm_collector, loading

_BLOCK_BYTES = 100_000
"""Larger than what Python keeps itself, smaller than what has a mapping of its own."""


def _anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


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


def test_what_was_needed_for_loading_only_goes_back_to_the_kernel() -> None:
    with loading():
        blocks = [b"x" * _BLOCK_BYTES for _ in range(601)]
        last = blocks.pop()
        loaded_bytes = _anonymous_bytes()
        # Below a block that stays: the C library doesn't return them by itself.
        del blocks
    assert loaded_bytes - _anonymous_bytes() > 500 * _BLOCK_BYTES
    assert len(last) == _BLOCK_BYTES


def test_the_collector_goes_on_after_loading_failed() -> None:
    with pytest.raises(ValueError, match="damaged"), loading():
        raise ValueError("damaged")
    assert gc.isenabled()
