"""Selectors: every kind against a naive model, its distribution, and its edge cases."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from contextlib import nullcontext
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.sampling.selectors import Selector, SelectorKind
from experience_buffer_server.settings.consumer import SelectorSettings
from tests.unit.sampling.selector_model import probabilities
from tests.unit.sampling.small_sizes import small_sizes

KINDS: tuple[SelectorKind, ...] = get_args(SelectorKind)
CERTAIN: tuple[SelectorKind, ...] = ("fifo", "lifo", "min", "max", "freshest")
RANDOM: tuple[SelectorKind, ...] = tuple(kind for kind in KINDS if kind not in CERTAIN)
VALUED: tuple[SelectorKind, ...] = tuple(
    kind for kind in KINDS if kind not in ("fifo", "lifo", "uniform")
)

VALUES = {
    "prioritized": st.sampled_from([0.0, 1e-3, 0.5, 1.0, 2.0, 1e3])
    | st.integers(0, 10_000).map(lambda n: n / 128),
    "advantage": st.sampled_from([0.0, -0.0, -2.0, 2.0])
    | st.integers(-900, 900).map(lambda n: n / 128),
    "staleness": st.sampled_from([-math.inf, 0.0, 1e9, -5.0, 0.5])
    | st.integers(0, 1200).map(float),
    "freshest": st.sampled_from([-math.inf, 0.0]) | st.integers(0, 3).map(float),
}
ANY_VALUE = st.sampled_from([0.0, 1.0, -1.0, math.inf, -math.inf]) | st.floats(allow_nan=False)
KEYS = st.integers(0, 40)
NOW = 1_763_740_800_000_000_000
FAR_VERSIONS = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.integers(NOW - 2000, NOW + 2000)
    | st.sampled_from([-(2**63), -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 2, 2**62, 2**63 - 1])
)
"""Policy versions of 64 bits, such as times in nanoseconds; None: unknown."""


def filled(plan: SelectorSettings, values: dict[int, float]) -> Selector:
    selector = plan.make()
    for key, value in values.items():
        selector.add(key, value)
    return selector


def take(selector: Selector, num: int) -> list[int]:
    """Choose and remove."""
    taken = []
    for _ in range(num):
        taken.append(selector.choose().key)
        selector.remove(taken[-1])
    return taken


def check_choice(plan: SelectorSettings, selector: Selector, values: dict[int, float]) -> int:
    key, probability = selector.choose()
    expected = probabilities(plan, values)[key]
    assert expected > 0.0
    assert probability == pytest.approx(expected, rel=1e-9)
    return key


def step(
    plan: SelectorSettings,
    selector: Selector,
    values: dict[int, float],
    key: int,
    value: float,
    op: str,
) -> None:
    """One operation on the selector and on the model."""
    if op == "choose" and values:
        check_choice(plan, selector, values)
    elif op == "take" and values:
        chosen = check_choice(plan, selector, values)
        selector.remove(chosen)
        del values[chosen]
    elif op == "put" and key in values:
        selector.update(key, value)
        values[key] = value
    elif op == "put":
        selector.add(key, value)
        values[key] = value
    elif op == "remove" and key in values:
        selector.remove(key)
        del values[key]
    elif op == "remove":
        with pytest.raises(KeyError):
            selector.remove(key)
        with pytest.raises(KeyError):
            selector.update(key, value)


@pytest.mark.parametrize("sizes", ["small", "real"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_agrees_with_the_model(
    kind: SelectorKind, sizes: Literal["small", "real"], data: st.DataObject
) -> None:
    plan = SelectorSettings(
        kind=kind,
        exponent=data.draw(st.sampled_from([0.0, 0.6, 1.0, 2.0])),
        decay=data.draw(st.sampled_from([1e-9, 0.3, 0.5, 0.99, 1.0])),
        seed=data.draw(st.integers(0, 9)),
    )
    ops = st.sampled_from(["put", "put", "put", "remove", "choose", "take"])
    steps = data.draw(st.lists(st.tuples(KEYS, VALUES.get(kind, ANY_VALUE), ops), max_size=80))
    with small_sizes() if sizes == "small" else nullcontext():
        selector, values = plan.make(), dict[int, float]()
        for key, value, op in steps:
            step(plan, selector, values, key, value, op)
            assert len(selector) == len(values)
            assert (key in selector) == (key in values)
        assert sorted(selector) == sorted(values)
        while values:
            step(plan, selector, values, 0, 0.0, "take")
    assert not selector


@pytest.mark.parametrize("kind", KINDS)
def test_empty(kind: SelectorKind) -> None:
    selector = SelectorSettings(kind=kind, seed=1).make()
    for _ in range(2):
        assert len(selector) == 0
        assert list(selector) == []
        assert 7 not in selector
        assert "7" not in selector
        with pytest.raises(IndexError):
            selector.choose()
        with pytest.raises(KeyError):
            selector.remove(7)
        with pytest.raises(KeyError):
            selector.update(7, 1.0)
        selector.add(7, 1.0)
        with pytest.raises(AssertionError):
            selector.add(7, 1.0)
        assert selector.choose() == (7, 1.0)
        assert 7 in selector
        assert "7" not in selector
        selector.remove(7)


@pytest.mark.parametrize("kind", CERTAIN)
def test_put_back_takes_the_old_place(kind: SelectorKind) -> None:
    values = {key: float(key % 7) for key in range(3000)}
    selector = filled(SelectorSettings(kind=kind), values)
    before = take(selector, 100)
    for key in sorted(before, key=lambda key: key * 37 % 101):
        selector.add(key, values[key])
    assert take(selector, 100) == before


def check_distribution(selector: Selector, expected: dict[int, float]) -> None:
    """Chi-square of 20,000 draws; the bound is 6 standard deviations above its mean."""
    drawn = Counter(selector.choose().key for _ in range(20_000))
    assert drawn.keys() <= {key for key, p in expected.items() if p > 0.0}
    statistic = sum(
        (drawn[key] - 20_000 * p) ** 2 / (20_000 * p) for key, p in expected.items() if p > 0.0
    )
    freedom = sum(p > 0.0 for p in expected.values()) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", RANDOM)
def test_distribution(kind: SelectorKind) -> None:
    plan = SelectorSettings(kind=kind, exponent=0.6, decay=0.9, seed=11)
    values = {key: float(key % 25) * (-1.0 if kind == "advantage" else 1.0) for key in range(100)}
    selector = filled(plan, values)
    for key in range(0, 100, 3):
        selector.remove(key)
        del values[key]
    check_distribution(selector, probabilities(plan, values))


@pytest.mark.parametrize("kind", KINDS)
def test_a_waiting_unit_takes_few_bytes(kind: SelectorKind) -> None:
    generator = random.Random(4)
    values = [generator.random() for _ in range(20_000)]
    if kind in ("staleness", "freshest"):
        values = [float(key // 512) for key in range(20_000)]
    tracemalloc.start()
    selector = SelectorSettings(kind=kind, seed=1).make()
    for key, value in enumerate(values):
        selector.add(key, value)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 9 <= size / len(selector) <= 56


@pytest.mark.parametrize("kind", RANDOM)
def test_the_seed_decides(kind: SelectorKind) -> None:
    def history(seed: int) -> list[int]:
        plan = SelectorSettings(kind=kind, seed=seed)
        selector = filled(plan, {key: float(key % 9) for key in range(500)})
        taken = take(selector, 50)
        for key in taken[::2]:
            selector.add(key, 3.0)
        return taken + take(selector, 100)

    assert history(1) == history(1)
    assert history(1) != history(2)


def test_without_a_seed_histories_differ() -> None:
    values = dict.fromkeys(range(1000), 1.0)
    first, second = (filled(SelectorSettings(kind="uniform"), values) for _ in range(2))
    assert take(first, 50) != take(second, 50)


@pytest.mark.parametrize("kind", ["prioritized", "advantage"])
class TestWeights:
    def test_exponent_zero_is_uniform(self, kind: SelectorKind) -> None:
        plan = SelectorSettings(kind=kind, exponent=0.0, seed=3)
        selector = filled(plan, {1: 0.0, 2: 5.0, 3: 1e300, 4: math.inf})
        assert {selector.choose() for _ in range(200)} == {(key, 0.25) for key in (1, 2, 3, 4)}

    @pytest.mark.parametrize("huge", [1e308, math.inf])
    def test_overflow_counts_as_the_largest(self, kind: SelectorKind, huge: float) -> None:
        selector = filled(
            SelectorSettings(kind=kind, exponent=4.0, seed=3), {1: 1.0, 2: huge, 3: huge}
        )
        assert {selector.choose() for _ in range(50)} == {(2, 0.5), (3, 0.5)}

    def test_underflow_is_not_zero(self, kind: SelectorKind) -> None:
        selector = filled(SelectorSettings(kind=kind, exponent=4.0, seed=3), {1: 0.0, 2: 1e-300})
        assert {selector.choose() for _ in range(50)} == {(2, 1.0)}


def test_only_advantages_may_be_negative() -> None:
    with pytest.raises(ValueError, match=r"unit 8 is -0\.1; it must be 0 or more"):
        SelectorSettings(kind="prioritized").make().add(8, -0.1)
    selector = filled(SelectorSettings(kind="advantage", seed=1), {1: -3.0, 2: 1.0})
    assert {selector.choose() for _ in range(50)} == {(1, 0.75), (2, 0.25)}


@pytest.mark.parametrize("kind", VALUED)
def test_nan_is_refused_and_changes_nothing(kind: SelectorKind) -> None:
    selector = filled(SelectorSettings(kind=kind, seed=1), {1: 1.0})
    with pytest.raises(ValueError, match="unit 2 is"):
        selector.add(2, math.nan)
    with pytest.raises(ValueError, match="unit 1 is"):
        selector.update(1, math.nan)
    assert list(selector) == [1]
    assert selector.choose() == (1, 1.0)


class TestStaleness:
    def test_distribution_across_eras(self) -> None:
        """With this decay an era has 500 versions."""
        plan = SelectorSettings(kind="staleness", seed=2)
        values = {1: -math.inf, 2: 499.0, 3: 500.0, 4: 501.0, 5: 498.0, 6: 500.0, 7: 497.5}
        selector = filled(plan, values)
        check_distribution(selector, probabilities(plan, values))
        for key in (4, 1, 3):
            selector.remove(key)
            del values[key]
            check_distribution(selector, probabilities(plan, values))

    def test_versions_that_come_and_go(self) -> None:
        """5,000 versions with a window of 40: eras start, empty and end."""
        plan = SelectorSettings(kind="staleness", decay=0.9, seed=2)
        selector, values = plan.make(), dict[int, float]()
        for version in range(5000):
            selector.add(version, float(version))
            values[version] = float(version)
            if len(values) > 40:
                chosen = check_choice(plan, selector, values)
                selector.remove(chosen)
                del values[chosen]

    @settings(max_examples=300)
    @given(
        decay=st.sampled_from([5e-324, 1e-6, 0.01, 0.5, 0.999, 1.0 - 2.0**-53, 1.0]),
        versions=st.lists(FAR_VERSIONS, min_size=1, max_size=12),
    )
    def test_any_64_bit_version(self, decay: float, versions: list[int | None]) -> None:
        plan = SelectorSettings(kind="staleness", decay=decay, seed=2)
        values = {
            key: -math.inf if version is None else float(version)
            for key, version in enumerate(versions)
        }
        selector = filled(plan, values)
        while values:
            chosen = check_choice(plan, selector, values)
            selector.remove(chosen)
            del values[chosen]

    def test_infinity_is_no_version(self) -> None:
        with pytest.raises(ValueError, match="unit 1 is inf; it must be a number"):
            SelectorSettings(kind="staleness").make().add(1, math.inf)
