"""What touches every token, on each device, against loops over single tokens in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import KlTerm
from tests.unit.advantages.devices import DEVICES
from tests.unit.advantages.token_rows import (
    COLUMNS,
    Row,
    loop_gae,
    loop_returns,
    loop_rewards,
    make_batch,
    make_rows,
    make_stages,
)

SEEDS = st.integers(0, 2**32 - 1)


def cut(dense: NDArray[Any], rows: Sequence[Row]) -> list[list[float]]:
    """Dense results per row."""
    ends = np.cumsum([len(row.mask) for row in rows])[:-1]
    return [part.tolist() for part in np.split(dense, ends)] if rows else []


def expect(found: NDArray[Any], expected: list[list[float]], tolerance: float = 1e-11) -> None:
    flat = np.array(list(itertools.chain(*expected)), dtype=np.float64)
    assert found.shape == flat.shape
    np.testing.assert_allclose(found, flat, rtol=tolerance, atol=tolerance)


def expect_zero_where_masked(found: NDArray[Any], batch: Batch) -> None:
    masked = found[batch.mask == 0]
    assert not masked.any()
    assert not np.signbit(masked).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["count", "skip"])
@settings(max_examples=60)
@given(
    seed=SEEDS,
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    has_token_rewards=st.booleans(),
)
def test_recursions_agree_with_loops(
    device: str,
    mode: str,
    seed: int,
    gamma: float,
    lam: float,
    dtype: type[np.floating[Any]],
    has_token_rewards: bool,
) -> None:
    rows = make_rows(seed, columns=COLUMNS if has_token_rewards else COLUMNS[1:])
    batch = make_batch(rows, dtype)
    stages = make_stages(batch, device)
    rewards = stages.rewards(batch.rewards, None)
    placed = [loop_rewards(row) for row in rows]
    expect(stages.exact(rewards), placed)
    returns = stages.exact(stages.returns(rewards, gamma=gamma, mask_mode=mode))
    expect(returns, [loop_returns(r, p, gamma, mode) for r, p in zip(rows, placed, strict=True)])
    pairs = [loop_gae(r, p, gamma, lam, mode) for r, p in zip(rows, placed, strict=True)]
    found = stages.gae(rewards, gamma=gamma, lam=lam, mask_mode=mode)
    for tokens, expected in zip(found, zip(*pairs, strict=True), strict=True):
        expect(stages.exact(tokens), list(expected))
        expect_zero_where_masked(stages.exact(tokens), batch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["count", "skip"])
def test_recursions_over_thousands_of_tokens(device: str, mode: str) -> None:
    rows = make_rows(5, lengths=[4999, 1, 0, 4096, 4097, 513, 2048, 31])
    rows += make_rows(6, lengths=[5000, 3001])
    stages = make_stages(make_batch(rows), device)
    rewards = stages.rewards(make_batch(rows).rewards, None)
    found, _ = stages.gae(rewards, gamma=0.999, lam=0.99, mask_mode=mode)
    expected = [loop_gae(row, loop_rewards(row), 0.999, 0.99, mode)[0] for row in rows]
    expect(stages.exact(found), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kl_is_subtracted(
    device: str, estimator: str, clip: float, dtype: type[np.floating[Any]]
) -> None:
    rows = make_rows(11, lengths=[0, 113, 64, 1])
    batch = make_batch(rows, dtype)
    stages = make_stages(batch, device)
    kl = KlTerm(coefficient=0.37, estimator=estimator, clip=clip)
    found = stages.exact(stages.rewards(batch.rewards, kl))
    expect(found, [loop_rewards(row, kl) for row in rows], tolerance=3e-6)
    # It is computed in float32: what float64 has more must not be there.
    alone = stages.exact(stages.rewards(batch.rewards * 0, kl))
    if estimator == "k1":
        without = stages.exact(stages.rewards(batch.rewards * 0, None))
        divided = (without - alone) / 0.37
        np.testing.assert_allclose(divided, divided.astype(np.float32), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
def test_overflowing_kl_stays_in_its_experience(device: str) -> None:
    rows = make_rows(12, lengths=[9, 8, 7, 64])
    for row in rows:
        row.mask = [True] * len(row.mask)
        row.columns = {name: [0.5] * len(row.mask) for name in COLUMNS}
    rows[1].columns["logprobs"][3] = -300.0
    stages = make_stages(make_batch(rows), device)
    rewards = stages.rewards(np.ones(4), KlTerm(coefficient=0.1, estimator="k3", clip=0.0))
    tokens = stages.returns(rewards, gamma=0.9, mask_mode="skip")
    finite = [np.isfinite(row).all() for row in cut(stages.fetch(tokens, None)[0], rows)]
    assert finite == [True, False, True, True]
    assert np.isfinite(stages.sums(tokens)).tolist() == finite


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40)
@given(seed=SEEDS, kind=st.sampled_from(["spread", "placed", "gap"]))
def test_scalar_stages_agree_with_loops(device: str, seed: int, kind: str) -> None:
    rows = make_rows(seed, columns=COLUMNS[1:])
    batch = make_batch(rows)
    stages = make_stages(batch, device)
    if kind == "spread":
        tokens = stages.spread(batch.rewards)
        numbers = [[row.reward if valid else 0.0 for valid in row.mask] for row in rows]
    elif kind == "placed":
        tokens, numbers = stages.rewards(batch.rewards, None), [loop_rewards(row) for row in rows]
    else:
        tokens = stages.teacher_gap(-1.5)
        numbers = [
            [
                -1.5 * (teacher - student) if valid else 0.0
                for teacher, student, valid in zip(
                    row.columns["teacher_logprobs"], row.columns["logprobs"], row.mask, strict=True
                )
            ]
            for row in rows
        ]
    expect(stages.exact(tokens), numbers)
    expect_zero_where_masked(stages.exact(tokens), batch)
    rng = np.random.default_rng(seed)
    shifts, scales = rng.normal(size=len(rows)), rng.normal(size=len(rows))
    valid = [np.array(row.mask, dtype=np.bool_) for row in rows]
    arrays = [np.array(row_numbers, dtype=np.float64) for row_numbers in numbers]
    expected = [
        np.where(m, (x - shift) * scale, 0.0).tolist()
        for x, m, shift, scale in zip(arrays, valid, shifts, scales, strict=True)
    ]
    moved = stages.affine(tokens, shifts_B=shifts, scales_B=scales)
    expect(stages.exact(moved), expected)
    expect_zero_where_masked(stages.exact(moved), batch)
    expect(stages.sums(tokens), [[math.fsum(x[m])] for x, m in zip(arrays, valid, strict=True)])
    squares = [
        [math.fsum((x[m] - shift) ** 2)] for x, m, shift in zip(arrays, valid, shifts, strict=True)
    ]
    expect(stages.square_sums(tokens, shifts), squares)
    clipped, outside = stages.clip(tokens, 0.5)
    expect(stages.exact(clipped), [np.clip(x, -0.5, 0.5).tolist() for x in arrays])
    assert outside.tolist() == [
        int((np.abs(x[m]) > 0.5).sum()) for x, m in zip(arrays, valid, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_rewards_of_two_calls_are_kept_apart(device: str) -> None:
    rows = make_rows(23, lengths=[64, 9])
    batch = make_batch(rows)
    stages = make_stages(batch, device)
    first, second = stages.rewards(batch.rewards, None), stages.rewards(batch.rewards * 2, None)
    expect(stages.exact(first), [loop_rewards(row) for row in rows])
    for row in rows:
        row.reward *= 2
    expect(stages.exact(second), [loop_rewards(row) for row in rows])


@pytest.mark.parametrize("device", DEVICES)
def test_stages_leave_their_arguments_as_they_are(device: str) -> None:
    batch = make_batch(make_rows(21, lengths=[64, 113]))
    stages = make_stages(batch, device)
    tokens = stages.teacher_gap(1.0)
    before = stages.exact(tokens).copy()
    ones = np.ones(2)
    stages.affine(tokens, shifts_B=ones, scales_B=ones * 2)
    stages.clip(tokens, 0.1)
    stages.gae(tokens, gamma=0.9, lam=0.9, mask_mode="count")
    stages.returns(tokens, gamma=0.9, mask_mode="count")
    np.testing.assert_array_equal(stages.exact(tokens), before)
    assert stages.affine(tokens, shifts_B=ones * 0, scales_B=ones) is tokens


@pytest.mark.parametrize("device", DEVICES)
def test_fetch_gives_float32_and_one_array_for_equal_tokens(device: str) -> None:
    batch = make_batch(make_rows(22, lengths=[0, 64, 113]))
    stages = make_stages(batch, device)
    gaps, spread = stages.teacher_gap(1.0), stages.spread(batch.rewards)
    for tokens in (gaps, spread):
        first, second = stages.fetch(tokens, tokens)
        assert first is second
        assert first.dtype == np.float32
        np.testing.assert_array_equal(first, stages.exact(tokens).astype(np.float32))
    fetched = stages.fetch(spread, gaps)
    for found, tokens in zip(fetched, (spread, gaps), strict=True):
        np.testing.assert_array_equal(found, stages.fetch(tokens, None)[0])
    assert stages.fetch(stages.spread(-batch.rewards * 0), None)[0].tobytes() == bytes(
        4 * len(batch.mask)
    )
