"""A linear recurrence over ragged sequences, from their ends to their starts, on a torch device.

Legend: N tokens, R sequences, S slots, K powers.
Lives here: the recurrence alone, and sums as its simplest case. What its terms mean is in
`torch_tokens.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experience_buffer_server.advantages.arrays.token_types import Floats, Ints

_OVERFLOW, _OVERFLOW_SEEN = 1e150, 1e140
"""What stands for infinity, and from where on it is seen: far beyond whatever finite inputs and
parameters lead to, and small enough to be added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanLayout:
    """Where the sequences of a batch lie in a scan. Made on the host, without waiting for a device.

    Each sequence has as many slots as the next power of two, and starts at a multiple of that,
    which longest-first order gives without gaps. So blocks of any level cut every sequence at the
    same places, wherever it lies: its result depends on nothing else in the batch.
    """

    starts: Ints
    """First slot of each sequence, shape of the lengths."""
    num_slots: int
    """S."""
    prefixes: tuple[int, ...]
    """Per level, how many slots belong to sequences of more than `2**level` slots: the first."""

    @classmethod
    def of(cls, lengths: Ints) -> ScanLayout:
        """Lay out sequences of the given lengths, each at least 1."""
        if len(lengths) == 0:
            return cls(starts=np.zeros(0, dtype=np.int64), num_slots=0, prefixes=())
        # Exact for integers, unlike the logarithm: frexp(n - 1) has exponent ceil(log2(n)).
        exponents = np.frexp(lengths - 1.0)[1].astype(np.int64)
        sizes = np.left_shift(1, exponents)
        order = np.argsort(-sizes, kind="stable")
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        slots_of = np.bincount(exponents, weights=sizes).astype(np.int64)
        longer = np.cumsum(slots_of[::-1])[::-1]
        return cls(starts=starts, num_slots=int(longer[0]), prefixes=tuple(longer[1:].tolist()))


def powers_down(base: float, most: int) -> Floats:
    """The base to the power of `most`, `most - 1`, ..., 0.

    Made on the host, one from the other: a device's own power may round differently from place to
    place.
    """
    factors = np.full(most + 1, base)
    factors[0] = 1.0
    return np.ascontiguousarray(np.cumprod(factors)[::-1])


def reverse_scan(
    terms_N: Tensor, *, slots_N: Tensor, powers_K: Tensor, layout: ScanLayout
) -> Tensor:
    """Solve `y_i = terms_i + base * y_{i+1}` within each sequence, for all of them at once.

    A slot without a token is a step without a term. Level by level, blocks of `2**level` slots are
    joined in pairs: each slot of the left one receives the right one's head, times the power of
    their distance. That is one operation per level and no wait for the device.

    Args:
        terms_N: Terms, shape [N], float64.
        slots_N: Slot of each token, shape [N], int64: its sequence's start plus its position.
        powers_K: The base to the power of K, K - 1, ..., 1, float64: `powers_down` without its
            last. K is at least half of the longest sequence's slots.
        layout: Where the sequences lie.

    Returns:
        The solution y, shape [N], float64; never -0.0. A term that isn't finite is infinity at its
        own place, and counts as 1e150 before it; whatever goes beyond 1e140 is infinity too.
    """
    solved_S = _in_slots(terms_N, slots_N, layout)
    for level, num_slots in enumerate(layout.prefixes):
        size = 1 << level
        left, right = solved_S[:num_slots].view(-1, 2, size).unbind(1)
        _add_product(left, powers_K[-size:], right[:, :1])
    return _taken(solved_S, slots_N)


def segment_sums(
    terms_N: Tensor, *, slots_N: Tensor, starts_R: Tensor, layout: ScanLayout
) -> Tensor:
    """Sum each sequence: what the recurrence has at its start for base 1, and the same bits.

    Args:
        terms_N: As in `reverse_scan`.
        slots_N: As in `reverse_scan`.
        starts_R: `layout.starts` on the device.
        layout: Where the sequences lie.

    Returns:
        The sums, shape [R], float64; in everything else as `reverse_scan`.
    """
    sums_S = _in_slots(terms_N, slots_N, layout)
    for level, num_slots in enumerate(layout.prefixes):
        size = 1 << level
        sums_S[: num_slots : 2 * size].add_(sums_S[size : num_slots : 2 * size])
    return _taken(sums_S, starts_R)


def _in_slots(terms_N: Tensor, slots_N: Tensor, layout: ScanLayout) -> Tensor:
    terms_S = terms_N.new_zeros(layout.num_slots)
    # Infinity times zero would be no number: a stand-in goes through.
    terms_S[slots_N] = terms_N.nan_to_num(nan=_OVERFLOW, posinf=_OVERFLOW, neginf=-_OVERFLOW)
    return terms_S


def _taken(solved_S: Tensor, slots: Tensor) -> Tensor:
    # Adding zero turns -0.0 into 0.0, as every level does that a sequence takes part in.
    solved = solved_S[slots] + 0.0
    return torch.where(solved.abs() < _OVERFLOW_SEEN, solved, torch.inf)


def _add_product(sums: Tensor, factors: Tensor, others: Tensor) -> None:
    """`sums += factors * others`, so that an element's result doesn't depend on its place."""
    if sums.is_cuda:
        sums.addcmul_(factors, others)
    else:
        # One operation may round differently in vectors than in what is left over by them.
        sums.add_(factors * others)
