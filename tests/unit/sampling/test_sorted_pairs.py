"""The sorted columns: places, chunks that split and join, and what they cost."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.sorted_pairs import MAX_CHUNK, KeyTable, Ranking
from tests.unit.sampling.small_sizes import small_sizes

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30)


def chunk_sizes(pairs: KeyTable[int] | Ranking) -> list[int]:
    sizes = [len(firsts) for firsts in pairs._firsts]
    assert sizes == [len(seconds) for seconds in pairs._seconds]
    assert list(pairs._ends) == [firsts[-1] for firsts in pairs._firsts]
    assert sum(sizes) == len(pairs)
    return sizes


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(KEYS, st.booleans()), max_size=120))
def test_a_table_is_a_dict(steps: list[tuple[int, bool]]) -> None:
    with small_sizes():
        table, model = KeyTable(array("q"), array("q")), dict[int, int]()
        for number, (key, adds) in enumerate(steps):
            if not adds:
                key = key if key in model or not model else max(model)
                assert (key in table) == (key in model)
                if key in model:
                    assert table.pop(key) == model.pop(key)
            elif key in model:
                table[key] = model[key] = number
            else:
                table.add(key, number)
                model[key] = number
            assert all(0 < size <= 4 for size in chunk_sizes(table))
        assert list(table) == sorted(model)
        assert {key: table[key] for key in model} == model
        if model:
            assert (table.first(), table.last()) == (min(model), max(model))


@settings(max_examples=200)
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), st.integers(0, 99)),
        unique=True,
        max_size=60,
    ),
    data=st.data(),
)
def test_a_ranking_is_a_sorted_list(pairs: list[tuple[float, int]], data: st.DataObject) -> None:
    with small_sizes():
        ranking = Ranking()
        for value, key in pairs:
            ranking.add(value, key)
        for value, key in data.draw(st.permutations(pairs)):
            assert (ranking.first(), ranking.last()) == (min(pairs), max(pairs))
            assert all(0 < size <= 4 for size in chunk_sizes(ranking))
            ranking.remove(value, key)
            pairs.remove((value, key))
    assert not ranking


def test_keys_in_order_leave_full_chunks() -> None:
    table = KeyTable(array("q"), array("q"))
    for key in range(5 * MAX_CHUNK):
        table.add(key, key)
    assert chunk_sizes(table) == [MAX_CHUNK] * 5


def test_holes_leave_no_crumbs() -> None:
    """Of 100 chunks one key in 100 stays: about a thousand keys, which fit into few chunks."""
    table = KeyTable(array("q"), array("q"))
    for key in range(100 * MAX_CHUNK):
        table.add(key, key)
    for key in range(100 * MAX_CHUNK):
        if key % 100:
            table.pop(key)
    assert len(table) == MAX_CHUNK
    assert len(chunk_sizes(table)) <= 16


def test_what_is_not_there() -> None:
    table = KeyTable(array("q"), array("d"))
    table.add(5, 0.5)
    for key in (4, 6):
        assert key not in table
        for use in (table.__getitem__, table.pop):
            with pytest.raises(KeyError, match=str(key)):
                use(key)
        with pytest.raises(KeyError):
            table[key] = 1.0
    with pytest.raises(AssertionError, match="key 5 is there already"):
        table.add(5, 1.0)
    assert table[5] == 0.5
