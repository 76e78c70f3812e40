"""The sum tree: exact after any history, and draws that land on weight."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.sum_tree import SumTree
from tests.unit.sampling.small_sizes import small_sizes

WEIGHTS = st.lists(
    st.just(0.0) | st.floats(0.0, 1e6) | st.sampled_from([2.0**-1000, 1e-20, 1.0, 2.0**900]),
    min_size=1,
    max_size=70,
)


def tree_of(weights: list[float]) -> SumTree:
    tree = SumTree()
    for weight in weights:
        tree.append(weight)
    return tree


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "append", "set", "pop", "sum"]), st.floats(0.0, 9.0)),
        max_size=120,
    ),
    slot=st.randoms(use_true_random=False),
)
def test_sums_are_those_of_a_fresh_tree(
    steps: list[tuple[str, float]], slot: random.Random
) -> None:
    with small_sizes():
        tree, weights = SumTree(), list[float]()
        for op, weight in steps:
            if op == "append":
                tree.append(weight)
                weights.append(weight)
            elif op == "sum":
                assert tree.total == tree_of(weights).total
            elif not weights:
                with pytest.raises(IndexError):
                    tree.pop()
            elif op == "pop":
                assert tree.pop() == weights.pop()
            else:
                place = slot.randrange(len(weights))
                tree[place] = weights[place] = weight
            assert len(tree) == len(weights)
        assert [tree[i] for i in range(len(tree))] == weights
        assert tree.total == tree_of(weights).total
        assert tree.total == pytest.approx(math.fsum(weights), rel=1e-12)


@settings(max_examples=300, deadline=None)
@given(weights=WEIGHTS, share=st.floats(0.0, 1.0))
def test_a_draw_lands_on_weight(weights: list[float], share: float) -> None:
    with small_sizes():
        tree = tree_of(weights)
        total = tree.total
        if total == 0.0:
            assert not any(weights)
            return
        for point in (0.0, share * total, total, math.nextafter(total, math.inf), math.inf):
            assert weights[tree.find(point)] > 0.0
        slot = tree.find(share * total)
        error = 1e-9 * total
        assert math.fsum(weights[:slot]) <= share * total + error
        assert math.fsum(weights[: slot + 1]) >= share * total - error


@pytest.mark.parametrize("num_slots", [1, 15, 16, 17, 256, 257, 5000])
def test_shares_start_and_end_where_the_sums_say(num_slots: int) -> None:
    tree = tree_of([1.0] * num_slots)
    assert tree.total == num_slots
    for slot in range(0, num_slots, 7):
        assert tree.find(slot) == slot
        assert tree.find(math.nextafter(slot + 1, 0.0)) == slot


def test_a_single_weight_among_zeros_is_always_found() -> None:
    tree = tree_of([0.0] * 1000)
    for slot in range(1000):
        tree[slot] = 0.1
        assert tree.total == 0.1
        for point in (0.0, 0.05, 0.1, 0.2):
            assert tree.find(point) == slot
        tree[slot] = 0.0
    assert tree.total == 0.0


def test_nothing_is_left_of_large_weights() -> None:
    """A sum that was moved by differences would keep rounding errors of the 1e18."""
    generator = random.Random(3)
    tree = tree_of([0.1] * 1000)
    before = tree.total
    for _ in range(20_000):
        slot = generator.randrange(1000)
        tree[slot] = generator.random() * 1e18
        tree.find(generator.random() * tree.total)
        tree[slot] = 0.1
    assert tree.total == before
