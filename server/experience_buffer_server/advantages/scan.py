"""A linear recurrence over ragged sequences, from their ends to their starts, on a torch device.

Legend: N packed tokens, S slots, L lanes of a block, M blocks.
Lives here: the recurrence alone. What its terms mean is in `torch_tokens.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .tokens import Ints

_LANE_BITS = 3
"""log2 of L: tokens of a block. More means fewer levels of more, thinner steps."""


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
    """S, a multiple of the longest sequence's slots."""
    bits: int
    """log2 of the longest sequence's slots."""

    @classmethod
    def of(cls, lengths: Ints) -> ScanLayout:
        """Lay out sequences of the given lengths, each at least 1."""
        if len(lengths) == 0:
            return cls(starts=np.zeros(0, dtype=np.int64), num_slots=0, bits=0)
        # Exact for integers, unlike the logarithm: frexp(n - 1) has exponent ceil(log2(n)).
        exponents = np.frexp(lengths - 1.0)[1].astype(np.int64)
        sizes = np.left_shift(1, exponents)
        order = np.argsort(-sizes, kind="stable")
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        longest = int(sizes.max())
        num_slots = -(-int(sizes.sum()) // longest) * longest
        return cls(starts=starts, num_slots=num_slots, bits=int(exponents.max()))

    def interleave(self, slots: Tensor) -> Tensor:
        """Where a slot lies in memory: lane-major, so that a lane of all blocks is contiguous."""
        lane_bits = min(self.bits, _LANE_BITS)
        num_blocks = self.num_slots >> lane_bits
        return (slots & ((1 << lane_bits) - 1)) * num_blocks + (slots >> lane_bits)


def reverse_scan(
    terms_N: Tensor, *, factors_N: Tensor, slots_N: Tensor, layout: ScanLayout
) -> Tensor:
    """Solve `y_i = terms_i + factors_i * y_{i+1}` within each sequence, for all of them at once.

    All blocks of L tokens step through their lanes together, carrying along what their successor
    is multiplied by; their heads are a recurrence L times shorter, solved in the same way; each
    block then receives its successor's head. That are `log(longest)` levels of L short operations
    and no wait for the device.

    Args:
        terms_N: Finite terms, shape [N], float64.
        factors_N: Finite factors, shape [N], float64, zero at the last token of each sequence.
        slots_N: Place of each token, shape [N], int64: `layout.interleave` of its sequence's start
            plus its position.
        layout: Where the sequences lie.

    Returns:
        The solution y, shape [N], float64; never -0.0.
    """
    if terms_N.numel() == 0:
        return torch.zeros_like(terms_N)
    # Rows: terms, zeros, factors. The first two are added, the last multiplies, in one operation.
    system_3S = terms_N.new_zeros(3, layout.num_slots)
    system_3S[0, slots_N] = terms_N
    system_3S[2, slots_N] = factors_N
    solved_S = _solve(system_3S, layout.bits)
    # Adding zero turns -0.0 into 0.0: whether levels that only a neighbour needs do that, varies.
    return solved_S[slots_N] + 0.0


def _solve(system_3S: Tensor, bits: int) -> Tensor:
    """Solve for lane-major slots, where no sequence is longer than `2**bits`; shape [S]."""
    lane_bits = min(bits, _LANE_BITS)
    num_lanes = 1 << lane_bits
    system_3LM = system_3S.view(3, num_lanes, -1)
    # Per slot: y if nothing followed its block, and the factor of what follows it.
    state_2LM = torch.empty_like(system_3LM[:2])
    lanes_L2M = state_2LM.unbind(1)
    terms_L2M, factors_L1M = system_3LM[:2].unbind(1), system_3LM[2:].unbind(1)
    lanes_L2M[-1].copy_(system_3LM[::2, -1])
    for lane in range(num_lanes - 2, -1, -1):
        _multiply_add(terms_L2M[lane], factors_L1M[lane], lanes_L2M[lane + 1], out=lanes_L2M[lane])
    if bits > lane_bits:
        heads_M = _solve_heads(lanes_L2M[0], bits - lane_bits)
        joined_LM = state_2LM[0, :, :-1]
        _multiply_add(joined_LM, state_2LM[1, :, :-1], heads_M[1:], out=joined_LM)
    return state_2LM[0].view(-1)


def _solve_heads(state_2M: Tensor, bits: int) -> Tensor:
    """Solve the recurrence over the blocks' first slots; shape [M], in the blocks' order."""
    num_lanes = 1 << min(bits, _LANE_BITS)
    system_3LM = state_2M.new_zeros(3, num_lanes, state_2M.shape[1] // num_lanes)
    system_3LM[::2] = state_2M.view(2, -1, num_lanes).transpose(1, 2)
    solved_S = _solve(system_3LM.view(3, -1), bits)
    return solved_S.view(num_lanes, -1).t().reshape(-1)


def _multiply_add(terms: Tensor, factors: Tensor, others: Tensor, *, out: Tensor) -> None:
    """`terms + factors * others`, so that an element's result doesn't depend on its place."""
    if out.is_cuda:
        torch.addcmul(terms, factors, others, out=out)
    else:
        # One operation may round differently in vectors than in what is left over by them.
        torch.add(terms, factors * others, out=out)
