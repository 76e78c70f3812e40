"""Plain data of rollouts, whatever it is: bounded, and what is left out is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experience_buffer_server.web.inside import bounded
from experience_buffer_server.web.inside.bounded import Bounded


def test_what_fits_is_copied_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "text"], "b": {"c": "d"}}
    copier = Bounded()
    assert copier.plain(value, "info") == value
    assert not copier.cuts


def test_long_texts_are_cut_and_named() -> None:
    copier = Bounded(num_chars=5)
    assert copier.plain({"say": ["short", "too long"]}, "info") == {"say": ["short", "too l"]}
    (cut,) = copier.cuts
    assert (cut.path, cut.num_chars, cut.num_entries) == ("info.say.1", 8, None)


def test_all_texts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_CHARS", 10)
    copier = Bounded(num_chars=4)
    shown = copier.plain(["1234"] * 100, "messages")
    assert sum(map(len, shown)) == 16
    assert len(copier.cuts) == 96


def test_deep_and_wide_data_ends_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = "end"
    for _ in range(200):
        deep = [deep]
    copier = Bounded()
    json.dumps(copier.plain(deep, "info"))
    assert copier.cuts[0].num_entries == 1
    monkeypatch.setattr(bounded, "_MOST_ENTRIES", 7)
    copier = Bounded()
    assert len(copier.plain(list(range(100)), "info")) == 7
    assert copier.cuts[0].num_entries == 100


def test_what_json_has_not_becomes_what_it_has() -> None:
    shown = Bounded().plain({1: b"123", "set": {4}, "big": (1, 2)}, "")
    assert shown == {"1": {"num_bytes": 3}, "set": [4], "big": [1, 2]}


def test_a_number_that_takes_long_to_write_is_only_described() -> None:
    assert Bounded().plain([10**1000, 10**5000], "") == [10**1000, "a whole number of 16610 bits"]


def test_a_long_list_costs_no_more_than_what_is_shown() -> None:
    class Counted(list[int]):
        looked = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for each in super().__iter__():
                Counted.looked += 1
                yield each

    Bounded().plain(Counted(range(100_000)), "info")
    assert Counted.looked <= 20_001
