"""Compiled loops over the tokens of a ragged batch. What they mean is in `cpu_tokens.py`.

Every kernel takes the rows (experiences) it is to work on, so that threads can share a batch, and
goes through each row on its own, one token after another: a row's result depends on that row
alone, whatever the other rows and however many threads. What stands in masked slots is never read;
results are exactly +0.0 there. Sums keep what each addition loses (Knuth's two-sum), so that n equal
numbers add up to n times the number, as `spread.py` has it: which of the two computes depends on an
experience's neighbours, and must not be seen. The GIL is released.

Legend: B experiences, D tokens of all experiences one after another, masked ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., None])
_Array = NDArray[Any]


def _compiled(function: _Function) -> _Function:
    # No fastmath: results have to be those of the written order of operations.
    try:
        # What is cached is found again only by the same processor and version of the source.
        return cast(_Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:
        # Neither beside the source nor in the user's home is there a place for it.
        return cast(_Function, numba.njit(nogil=True)(function))


@_compiled
def spread(
    rows: _Array, offsets: _Array, mask: _Array, num_valid: _Array, scores: _Array, out: _Array
) -> None:
    """Write each row's score to its valid tokens."""
    for row in rows:
        start, end = offsets[row], offsets[row + 1]
        score = out.dtype.type(scores[row] + 0.0)
        target = out[start:end]
        if num_valid[row] == end - start:
            target[:] = score
        else:
            valid = mask[start:end]
            for token in range(end - start):
                target[token] = score if valid[token] != 0 else out.dtype.type(0.0)


@_compiled
def copy(rows: _Array, offsets: _Array, mask: _Array, tokens: _Array, out: _Array) -> None:
    """Copy valid tokens, in another precision if the arrays' differ."""
    for row in rows:
        start, end = offsets[row], offsets[row + 1]
        source, target, valid = tokens[start:end], out[start:end], mask[start:end]
        for token in range(end - start):
            target[token] = source[token] if valid[token] != 0 else 0.0


@_compiled
def add_at_last(rows: _Array, offsets: _Array, mask: _Array, scalars: _Array, out: _Array) -> None:
    """Add each row's scalar to its last valid token."""
    for row in rows:
        for token in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if mask[token] != 0:
                out[token] += scalars[row]
                break


@_compiled
def subtract_kl(
    rows: _Array, offsets: _Array, mask: _Array, logprobs: _Array, references: _Array,
    coefficient: float, estimator: int, clip: float, out: _Array,
) -> None:  # fmt: skip
    """Subtract `coefficient * KL` from valid tokens; the KL itself in float32."""
    half, one, bound = np.float32(0.5), np.float32(1.0), np.float32(clip)
    for row in rows:
        for token in range(offsets[row], offsets[row + 1]):
            if mask[token] == 0:
                continue
            kl = np.float32(logprobs[token]) - np.float32(references[token])
            if estimator == 2:
                kl = half * (kl * kl)
            elif estimator == 3:
                kl = np.exp(-kl) - one + kl
            if bound > 0.0:
                kl = min(max(kl, -bound), bound)
            out[token] -= coefficient * np.float64(kl)


@_compiled
def returns(
    rows: _Array, offsets: _Array, mask: _Array, scalars: _Array, rewards: _Array,
    gamma: float, counts_masked: bool, out: _Array,
) -> None:  # fmt: skip
    """`R_t = r_t + gamma R_{t+1}`; r is the row's scalar on its last valid token plus `rewards`.

    `rewards` is empty where there is nothing but the scalar.
    """
    for row in rows:
        later, reward = 0.0, scalars[row]
        for token in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            if mask[token] != 0:
                if rewards.size > 0:
                    reward += rewards[token]
                later = reward + gamma * later
                reward = 0.0
                out[token] = later + 0.0
            else:
                out[token] = 0.0
                if counts_masked:
                    later = gamma * later


@_compiled
def gae(
    rows: _Array, offsets: _Array, mask: _Array, values: _Array, bootstraps: _Array,
    scalars: _Array, rewards: _Array, gamma: float, decay: float, counts_masked: bool,
    advantages: _Array, returns: _Array,
) -> None:  # fmt: skip
    """`A_t = r_t + gamma v_{t+1} - v_t + decay A_{t+1}`, `R = A + v`; r as in `returns`."""
    for row in rows:
        start, token = offsets[row], offsets[row + 1] - 1
        while token >= start and mask[token] == 0:
            advantages[token] = 0.0
            returns[token] = 0.0
            token -= 1
        later, next_value, reward = 0.0, bootstraps[row], scalars[row]
        while token >= start:
            if mask[token] != 0:
                value = np.float64(values[token])
                if rewards.size > 0:
                    reward += rewards[token]
                later = reward + gamma * next_value - value + decay * later
                next_value, reward = value, 0.0
                advantages[token] = later + 0.0
                returns[token] = later + value + 0.0
            else:
                advantages[token] = 0.0
                returns[token] = 0.0
                if counts_masked:
                    later = gamma * next_value + decay * later
                    next_value = 0.0
            token -= 1


@_compiled
def scaled_gap(
    rows: _Array, offsets: _Array, mask: _Array, minuends: _Array, subtrahends: _Array,
    coefficient: float, out: _Array,
) -> None:  # fmt: skip
    """`coefficient * (minuend - subtrahend)` of valid tokens."""
    for row in rows:
        for token in range(offsets[row], offsets[row + 1]):
            if mask[token] != 0:
                gap = np.float64(minuends[token]) - np.float64(subtrahends[token])
                out[token] = coefficient * gap + 0.0
            else:
                out[token] = 0.0


@_compiled
def affine(
    rows: _Array, offsets: _Array, mask: _Array, tokens: _Array, shifts: _Array, scales: _Array,
    out: _Array,
) -> None:  # fmt: skip
    """`(x - shift) * scale` of valid tokens, with one shift and scale per row."""
    for row in rows:
        shift, scale = shifts[row], scales[row]
        for token in range(offsets[row], offsets[row + 1]):
            if mask[token] != 0:
                out[token] = (np.float64(tokens[token]) - shift) * scale + 0.0
            else:
                out[token] = 0.0


@_compiled
def count_outside(rows: _Array, offsets: _Array, tokens: _Array, bound: float, out: _Array) -> None:
    """Per row, the tokens outside [-bound, bound]; masked ones are 0 and so never are."""
    for row in rows:
        outside = 0
        for token in range(offsets[row], offsets[row + 1]):
            if abs(np.float64(tokens[token])) > bound:
                outside += 1
        out[row] = outside


@_compiled
def clip(rows: _Array, offsets: _Array, tokens: _Array, bound: float, out: _Array) -> None:
    """Clamp to [-bound, bound]; masked tokens are 0 and stay so."""
    for row in rows:
        for token in range(offsets[row], offsets[row + 1]):
            out[token] = min(max(np.float64(tokens[token]), -bound), bound)


@_compiled
def sums(rows: _Array, offsets: _Array, tokens: _Array, out: _Array) -> None:
    """Sum of each row, rounded once; masked tokens are 0."""
    for row in rows:
        total = lost = 0.0
        for token in range(offsets[row], offsets[row + 1]):
            term = np.float64(tokens[token])
            rounded = total + term
            kept = rounded - total
            lost += (total - (rounded - kept)) + (term - kept)
            total = rounded
        out[row] = total + lost


@_compiled
def square_sums(
    rows: _Array, offsets: _Array, mask: _Array, tokens: _Array, centres: _Array, out: _Array
) -> None:
    """Sum of `(x - centre)^2` over each row's valid tokens, rounded once after the squares."""
    for row in rows:
        total = lost = 0.0
        for token in range(offsets[row], offsets[row + 1]):
            if mask[token] == 0:
                continue
            gap = np.float64(tokens[token]) - centres[row]
            term = gap * gap
            rounded = total + term
            kept = rounded - total
            lost += (total - (rounded - kept)) + (term - kept)
            total = rounded
        out[row] = total + lost
