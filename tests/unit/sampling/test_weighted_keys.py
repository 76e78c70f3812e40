"""Keys with weights: exact after any history, and drawn as often as their weights say."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.weighted_keys import WeightedKeys

LEAST, MOST = 2.0**-1000, 2.0**900
WEIGHTS = (
    st.sampled_from([0.0, LEAST, 1e-300, 1e-20, 0.5, math.nextafter(0.5, 1.0), 1.0, 1e270, MOST])
    | st.floats(0.0, 9.0).map(lambda weight: 0.0 if weight < LEAST else weight)
    | st.integers(-1000, 899).map(lambda exponent: 2.0**exponent * 1.7)
)


def filled(weights: Mapping[int, float]) -> WeightedKeys:
    keys = WeightedKeys()
    for key, weight in weights.items():
        keys.add(key, weight)
    return keys


def check(keys: WeightedKeys, weights: Mapping[int, float], generator: random.Random) -> None:
    """The sums are those of keys that were added just now, and a draw is as probable as it says."""
    assert keys.total == filled(weights).total == pytest.approx(math.fsum(weights.values()))
    assert len(keys) == len(weights)
    assert keys._order == sorted(keys._order)
    if not weights:
        with pytest.raises(IndexError):
            keys.draw(generator)
        return
    key, probability = keys.draw(generator)
    if keys.total:
        assert weights[key] > 0.0
        assert probability == pytest.approx(weights[key] / math.fsum(weights.values()), rel=1e-12)
    else:
        assert probability == 1.0 / len(weights)


@settings(max_examples=300)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "remove", "take", "check"]), st.integers(0, 30), WEIGHTS
        ),
        max_size=120,
    ),
    generator=st.randoms(use_true_random=False),
)
def test_histories(steps: list[tuple[str, int, float]], generator: random.Random) -> None:
    keys, weights = WeightedKeys(), dict[int, float]()
    for op, key, weight in steps:
        if op == "put":
            (keys.update if key in weights else keys.add)(key, weight)
            weights[key] = weight
        elif op == "check":
            check(keys, weights, generator)
        elif op == "take" and weights:
            key, _ = keys.draw(generator)
            keys.remove(key)
            del weights[key]
        elif op == "remove" and key in weights:
            keys.remove(key)
            del weights[key]
        assert (key in keys) == (key in weights)
    assert sorted(keys) == sorted(weights)
    check(keys, weights, generator)


def agrees(drawn: Counter[tuple[int, ...]], expected: Mapping[tuple[int, ...], float]) -> bool:
    """Whether the chi-square statistic is within 5 standard deviations of its mean."""
    number = drawn.total()
    assert drawn.keys() <= expected.keys()
    assert math.fsum(expected.values()) == pytest.approx(1.0)
    # What is rarer than 10 draws isn't told apart: the statistic would follow another distribution.
    often = {case: number * p for case, p in expected.items() if number * p >= 10.0}
    found = [(drawn[case], mean) for case, mean in often.items()]
    rest = number - sum(mean for _, mean in found)
    if rest >= 10.0:
        found.append((number - sum(count for count, _ in found), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in found)
    freedom = len(found) - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


SPREADS = {
    "within a tier": [1.1, 1.3, 1.9, 1.5, 2.0, 1.001],
    "around powers of two": [
        1.0,
        math.nextafter(1.0, 2.0),
        math.nextafter(1.0, 0.0),
        2.0,
        0.5,
        4.0,
    ],
    "near tiers": [0.7, 1.3, 3.9, 0.2, 9.0, 0.05],
    "near tiers, tiny": [LEAST * weight for weight in (1.0, 1.3, 3.9, 2.0, 9.0, 16.0)],
    "near tiers, huge": [MOST / weight for weight in (1.0, 1.3, 3.9, 2.0, 9.0, 16.0)],
    "with a weight of 0": [1.0, 0.0, 3.0, 2.5, 0.7, 0.3],
    "all orders of magnitude": [1e-300, 1e-20, 1.0, 1.5, 1e250, 2.5e250],
}


@pytest.mark.parametrize("weights", SPREADS.values(), ids=SPREADS)
def test_draws_without_replacement(weights: list[float]) -> None:
    """Triples, with everything put back before the next: as often as the products of shares say."""
    keys, generator = filled(dict(enumerate(weights))), random.Random(5)
    drawn: Counter[tuple[int, ...]] = Counter()
    for _ in range(12_000):
        taken = []
        for _ in range(3):
            taken.append(keys.draw(generator).key)
            keys.remove(taken[-1])
        for key in taken:
            keys.add(key, weights[key])
        drawn[tuple(taken)] += 1
    expected: dict[tuple[int, ...], float] = {}
    for triple in permutations(range(len(weights)), 3):
        left, share = dict(enumerate(weights)), 1.0
        for key in triple:
            share *= left[key] / math.fsum(left.values())
            del left[key]
        expected[triple] = share
    assert agrees(drawn, {triple: share for triple, share in expected.items() if share})


def test_nothing_is_left_of_large_weights() -> None:
    """A sum that was moved by differences would keep rounding errors of the large ones."""
    generator = random.Random(3)
    keys = filled(dict.fromkeys(range(1000), 0.1))
    before = keys.total
    for _ in range(5000):
        key = generator.randrange(1000)
        keys.update(key, 0.06 + generator.random() * 10.0 ** generator.randrange(-2, 18))
        keys.draw(generator)
        keys.update(key, 0.1)
    assert keys.total == before
    assert len(keys._tiers) == 1


def test_weights_far_apart_come_in_their_order() -> None:
    weights = [10.0**exponent for exponent in range(-300, 271, 30)]
    keys, generator = filled(dict(enumerate(weights))), random.Random(2)
    for key in reversed(range(len(weights))):
        choice = keys.draw(generator)
        assert choice.key == key
        assert choice.probability == pytest.approx(1.0)
        keys.remove(key)


class Scripted(random.Random):
    """Always the same number."""

    number = 0.0

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53, 1.0])
def test_a_draw_at_the_edge_finds_weight(number: float) -> None:
    """1.0 stands for a point that rounding puts past the end; a weight of 2**n accepts any number."""
    generator = Scripted(1)
    generator.number = number
    keys = filled({1: 4.0, 2: 0.0, 3: 0.25})
    if number == 1.0:
        generator.random = iter([number, 0.5]).__next__  # type: ignore[method-assign]
    assert keys.draw(generator).key == (3 if 0.0 < number < 1.0 else 1)
