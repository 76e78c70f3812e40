"""A linear recurrence over ragged sequences, from their ends to their starts.

Legend: N packed tokens, B sequences, K lanes of a block, M blocks.
Lives here: the recurrence alone. What its terms mean is in `token_returns.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 32
"""K: tokens of a block. Larger means more, thinner steps; smaller means more blocks to link."""


def reverse_scan(terms_N: Tensor, *, factors_N: Tensor, offsets: Tensor) -> Tensor:
    """Solve `y_i = terms_i + factors_i * y_{i+1}` within each sequence, for all of them at once.

    Each sequence is cut into blocks of K tokens, counted from its own start. All blocks step
    through their lanes together, then the blocks' heads are linked by doubling, then each block
    receives its successor's head: 2 multiplications and 2 additions per token, and
    `K + log2(longest / K)` steps. Multiplications and additions are separate operations and
    blocks are aligned to their sequence, so a sequence's result doesn't depend, not in a single
    bit, on where it lies or on what else is in the batch.

    Args:
        terms_N: Finite terms, shape [N], float64.
        factors_N: Finite factors, shape [N], float64, zero at the last token of each sequence.
        offsets: Sequence b holds tokens `offsets[b]` to `offsets[b + 1]`, shape [B + 1], int64;
            empty sequences are allowed.

    Returns:
        The solution y, shape [N], float64; never -0.0.
    """
    num_tokens = terms_N.numel()
    if num_tokens == 0:
        return torch.zeros_like(terms_N)
    lengths = offsets.diff()
    blocks = (lengths + (_LANES - 1)) // _LANES
    block_ends = blocks.cumsum(0)
    # One wait for the device: shapes have to be known here.
    num_blocks, max_blocks = torch.stack([block_ends[-1], blocks.max()]).tolist()

    def per_token(per_sequence: Tensor) -> Tensor:
        return per_sequence.repeat_interleave(lengths, output_size=num_tokens)

    within = torch.arange(num_tokens, device=terms_N.device) - per_token(offsets[:-1])
    # Lane-major, so that one step of all blocks touches contiguous memory.
    slots = (within % _LANES) * num_blocks + within // _LANES + per_token(block_ends - blocks)
    y_KM = terms_N.new_zeros(_LANES * num_blocks)
    y_KM[slots] = terms_N
    y_KM = y_KM.view(_LANES, num_blocks)
    products_KM = terms_N.new_zeros(_LANES * num_blocks)
    products_KM[slots] = factors_N
    products_KM = products_KM.view(_LANES, num_blocks)

    for lane in range(_LANES - 2, -1, -1):
        y_KM[lane] += products_KM[lane] * y_KM[lane + 1]
        products_KM[lane] *= products_KM[lane + 1]
    heads_M = _link(y_KM[0].clone(), products_KM[0].clone(), max_blocks)
    successors_M = torch.cat([heads_M[1:], heads_M.new_zeros(1)])
    y_KM += products_KM * successors_M
    # Adding zero turns -0.0 into 0.0: linking passes that only a neighbour needs can do that too.
    return y_KM.view(-1)[slots] + 0.0


def _link(heads_M: Tensor, products_M: Tensor, max_blocks: int) -> Tensor:
    """Solve the recurrence over blocks by doubling; a sequence's last block has product 0."""
    stride = 1
    while stride < max_blocks:
        heads_M[:-stride] += products_M[:-stride] * heads_M[stride:]
        # The right side is a new tensor: in place, elements would be read after being written.
        products_M[:-stride] = products_M[:-stride] * products_M[stride:]
        stride *= 2
    return heads_M
