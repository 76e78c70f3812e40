"""What must change no bit of what touches every token: threads, neighbours, kinds of memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import KlTerm
from experience_buffer_server.advantages.kernels import cpu_kernels
from experience_buffer_server.advantages.kernels.cpu_tokens import Precision, deal
from experience_buffer_server.advantages.kernels.devices import token_stages
from tests.unit.advantages.token_rows import COLUMNS, make_batch, make_rows, make_stages

DEVICES = ("cpu", "torch:cpu")
NUM_DENSE = 9
SEEDS = st.integers(0, 2**32 - 1)


def everything(batch: Batch, device: str, threads: int) -> list[NDArray[Any]]:
    """Results of all stages, in float64: `NUM_DENSE` per token, the rest per experience."""
    stages = make_stages(batch, device, threads=threads)
    kl = KlTerm(coefficient=0.1, estimator="k3", clip=2.0)
    rewards = stages.rewards(batch.rewards, kl)
    advantages, returns = stages.gae(rewards, gamma=0.99, lam=0.9, mask_mode="count")
    moved = stages.affine(advantages, shifts_B=batch.rewards, scales_B=batch.bootstraps)
    clipped, outside = stages.clip(moved, 0.5)
    later = stages.returns(rewards, gamma=0.9, mask_mode="skip")
    dense = [rewards, advantages, returns, moved, clipped, later, stages.teacher_gap(2.0)]
    dense += [stages.spread(batch.rewards), stages.rewards(batch.rewards, None)]
    sums = [stages.sums(later), stages.square_sums(later, batch.rewards), outside]
    return [stages.exact(tokens) for tokens in dense] + sums


@pytest.mark.parametrize(
    "lengths", [[60_000, 17, 30_000, 0, 65_000, 12_345], [120_000, *[100] * 199]]
)
def test_threads_change_no_bit(lengths: list[int]) -> None:
    batch = make_batch(make_rows(31, lengths=lengths))
    alone = everything(batch, "cpu", 1)
    for threads in (2, 3, 5):
        shared = everything(batch, "cpu", threads)
        assert [r.tobytes() for r in shared] == [r.tobytes() for r in alone]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=25)
@given(seed=SEEDS)
@example(seed=25011)  # As many tokens as experiences.
def test_neighbours_change_no_bit(device: str, seed: int) -> None:
    rows = make_rows(seed)
    together = everything(make_batch(rows), device, 1)
    ends = np.cumsum([len(row.mask) for row in rows])
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        alone = everything(make_batch([row]), device, 1)
        for place, (result, expected) in enumerate(zip(together, alone, strict=True)):
            is_dense = place < NUM_DENSE
            own = result[end - len(row.mask) : end] if is_dense else result[index : index + 1]
            assert own.tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_one_number_per_experience_or_per_token_change_no_bit(device: str) -> None:
    rows = make_rows(51, lengths=[4999, 113, 7, 1, 0, 64], columns=("token_level_reward",))
    for row in rows:
        row.has_token_rewards = False
    alone = make_batch(rows)
    alone.columns.clear()
    results = []
    for batch in (alone, make_batch(rows)):
        stages = make_stages(batch, device)
        tokens = stages.rewards(batch.rewards, None)
        tokens = stages.returns(tokens, gamma=1.0, mask_mode="skip")
        sums = [stages.sums(tokens), stages.square_sums(tokens, batch.bootstraps)]
        tokens = stages.affine(tokens, shifts_B=batch.bootstraps, scales_B=batch.rewards)
        tokens, outside = stages.clip(tokens, 0.3)
        results.append([r.tobytes() for r in (*sums, outside, stages.exact(tokens))])
    assert results[0] == results[1]


def test_float32_precision_rounds_once() -> None:
    batch = make_batch(make_rows(41, lengths=[3000, 500]))
    results = []
    precisions: tuple[Precision, ...] = ("float32", "float64")
    for precision in precisions:
        stages = token_stages(batch, device="cpu", threads=1, precision=precision)
        rewards = stages.rewards(batch.rewards, None)
        tokens = stages.gae(rewards, gamma=0.99, lam=0.95, mask_mode="skip")
        results.append(b"".join(array.tobytes() for array in stages.fetch(*tokens)))
    assert results[0] == results[1]


def test_read_only_and_unaligned_columns_are_compiled_for_once() -> None:
    batch = make_batch(make_rows(42, lengths=[113, 64]))
    expected = everything(batch, "cpu", 1)
    compiled = len(cast(Any, cpu_kernels.gae).signatures)
    data = b"x" + batch.columns["values"].tobytes()
    batch.columns["values"] = np.frombuffer(data, dtype=np.uint8)[1:].view(np.float32)
    found = everything(batch, "cpu", 1)
    assert [r.tobytes() for r in found] == [r.tobytes() for r in expected]
    assert len(cast(Any, cpu_kernels.gae).signatures) == compiled


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_without_experiences(device: str) -> None:
    batch = make_batch([])
    batch.columns.update({name: np.empty(0, dtype=np.float32) for name in COLUMNS})
    assert all(len(result) == 0 for result in everything(batch, device, 2))


@pytest.mark.parametrize(
    ("lengths", "threads"),
    [([100_000] * 8, 2), ([140_000, *[10] * 7000], 2), ([0, 0, 90_000, 60_000, 0], 3), ([5], 4)],
)
def test_parts_are_shares_of_all_rows(lengths: list[int], threads: int) -> None:
    parts = deal(np.cumsum([0, *lengths]), threads=threads)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in part) for part in parts]
    assert loads == sorted(loads, reverse=True)
    if sum(lengths) > 131_072:
        assert len(parts) >= 2
        assert max(loads) <= max(lengths) + sum(lengths) / threads / 4
    else:
        assert len(parts) == 1
