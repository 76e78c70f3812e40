"""Statistics of rewards and tokens over units: the experiences of a group, or of a statistics batch.

Sums over the tokens of one experience come from the device; those of the experiences of a unit are
combined here with `math.fsum`, so the order of the members changes no bit.

Legend: B experiences, G groups, U units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints, Tokens, TokenStages

from .votes import ballot

Flags = NDArray[np.bool_]


class Numbers(NamedTuple):
    """Numbers whose statistics are taken, a few per experience."""

    counts_B: Ints
    """How many of them each experience has, shape [B]."""
    sums: Callable[[Floats], Floats]
    """Sum of `x - centre` over each experience's numbers, shape [B]; of its centre, shape [B]."""
    square_sums: Callable[[Floats], Floats]
    """The same of `(x - centre)^2`."""


def votes(rewards_B: Floats, counts_B: Ints) -> Numbers:
    """One reward per run; counts are 1 where an experience votes, else 0."""

    def sums(centres_B: Floats) -> Floats:
        return np.multiply(rewards_B - centres_B, counts_B)

    def square_sums(centres_B: Floats) -> Floats:
        return np.multiply((rewards_B - centres_B) ** 2, counts_B)

    return Numbers(counts_B, sums, square_sums)


def valid_tokens(stages: TokenStages, tokens: Tokens, counts_B: Ints) -> Numbers:
    """The valid tokens of each experience."""

    def sums(centres_B: Floats) -> Floats:
        ones_B = np.ones_like(centres_B)
        return stages.sums(stages.affine(tokens, shifts_B=centres_B, scales_B=ones_B))

    return Numbers(counts_B, sums, partial(stages.square_sums, tokens))


def means(numbers: Numbers, bounds: Ints) -> Floats:
    """Mean of each unit's numbers, shape [U]; 0 where there are none."""
    counts_U = np.maximum(per_unit(numbers.counts_B, bounds), 1)
    zeros_B = np.zeros(len(numbers.counts_B))
    means_U = fsums(numbers.sums(zeros_B), bounds) / counts_U
    rests_B = numbers.sums(spread(means_U, bounds))
    corrected_U: Floats = means_U + fsums(rests_B, bounds) / counts_U
    return corrected_U


def lone_runs(batch: Batch, level: str) -> Flags:
    """Units of level `group` with one run only, shape [U]; none of level `batch`."""
    if level == "batch":
        return np.zeros(len(bounds_of(batch, level)) - 1, dtype=np.bool_)
    lone_U: Flags = np.diff(ballot(batch, batch.voters).offsets) < 2
    return lone_U


def bounds_of(batch: Batch, level: str) -> Ints:
    """Unit u holds experiences `bounds[u]` to `bounds[u + 1]`, shape [U + 1]."""
    if level == "group":
        return batch.group_offsets
    num_batches = int(batch.batches[-1]) + 1 if len(batch.batches) else 0
    first_groups = np.searchsorted(batch.batches, np.arange(num_batches + 1))
    return batch.group_offsets[first_groups]


def per_group(numbers_U: Floats, batch: Batch, level: str) -> Floats:
    """Each group its unit's number, shape [G]."""
    return numbers_U if level == "group" else numbers_U[batch.batches]


def spread(numbers_U: Floats, bounds: Ints) -> Floats:
    """Each experience its unit's number, shape [B]."""
    return np.repeat(numbers_U, np.diff(bounds))


def per_unit(counts_B: Ints, bounds: Ints) -> Ints:
    """Counts of each unit, shape [U]."""
    totals = np.concatenate([[0], np.cumsum(counts_B, dtype=np.int64)])
    return np.diff(totals[bounds])


def fsums(numbers_B: Floats, bounds: Ints) -> Floats:
    """Correctly rounded sum of each unit's numbers, shape [U]."""
    numbers = numbers_B.tolist()
    return np.array(
        [math.fsum(numbers[start:stop]) for start, stop in itertools.pairwise(bounds.tolist())],
        dtype=np.float64,
    )
