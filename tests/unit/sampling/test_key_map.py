"""The map of pages: a dict, whose pages go with their last keys."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.key_map import KeyMap

KEYS = st.integers(-(2**63), 2**63 - 1) | st.integers(-70, 200)


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(KEYS, st.booleans()), max_size=120))
def test_a_map_is_a_dict(steps: list[tuple[int, bool]]) -> None:
    numbers, model = KeyMap(array("q", [-1])), dict[int, int]()
    for number, (key, adds) in enumerate(steps):
        if not adds:
            key = key if key in model or not model else max(model)
            assert (key in numbers) == (key in model)
            if key in model:
                assert numbers.pop(key) == model.pop(key)
        elif key in model:
            numbers[key] = model[key] = number
        else:
            numbers.add(key, number)
            model[key] = number
        assert len(numbers) == len(model)
        assert numbers._pages.keys() == {key >> 6 for key in model}
    assert sorted(numbers) == sorted(model)
    assert {key: numbers[key] for key in model} == model


@pytest.mark.parametrize("neighbour", [None, 4, 6])
def test_what_is_not_there(neighbour: int | None) -> None:
    numbers = KeyMap(array("d", [math.inf]))
    if neighbour is not None:
        numbers.add(neighbour, -math.inf)
    assert 5 not in numbers
    assert "5" not in numbers
    for use in (numbers.__getitem__, numbers.pop):
        with pytest.raises(KeyError, match="5"):
            use(5)
    numbers.add(5, 0.5)
    with pytest.raises(AssertionError, match="key 5 is there already"):
        numbers.add(5, 1.0)
    assert numbers[5] == 0.5
    assert len(numbers) == 1 + (neighbour is not None)
