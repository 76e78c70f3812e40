"""The plain loops that advantages are compared with, the inputs of the comparison, and its measure.

Legend: B experiences, T padded tokens, D tokens of all experiences one after another.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experience_buffer_server.advantages import Column, ExperienceInput

GAMMA, LAM = 1.0, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Ragged sequences with masked stretches inside."""

    offsets: NDArray[np.int64]
    """Sequence b holds tokens `offsets[b]` to `offsets[b + 1]`."""
    mask: NDArray[np.bool_]
    """Shape [D]."""
    values: NDArray[np.float32]
    """Shape [D]."""
    rewards: NDArray[np.float32]
    """Of the last valid token, shape [B]."""

    def experiences(self) -> list[list[ExperienceInput]]:
        """The sequences as they lie in payloads, in groups of up to eight."""
        bounds = list(zip(self.offsets.tolist(), self.offsets[1:].tolist(), strict=False))
        items = [
            ExperienceInput(
                reward=float(reward),
                mask=Column("BOOL", self.mask[start:stop].tobytes()),
                values=Column("F32", self.values[start:stop].tobytes()),
            )
            for (start, stop), reward in zip(bounds, self.rewards, strict=True)
        ]
        return [items[start : start + 8] for start in range(0, len(items), 8)]

    def last_valid(self) -> NDArray[np.int64]:
        """Position of each sequence's last valid token; every sequence has one."""
        stops = self.offsets[1:]
        valid = np.flatnonzero(self.mask)
        return valid[np.searchsorted(valid, stops) - 1]


def padded_equivalent(num_rows: int, width: int, *, valid: float) -> Sequences:
    """Sequences up to a width; a part of rows times width is valid tokens, a tenth is masked."""
    rng = np.random.default_rng(num_rows)
    # Uniform lengths have a mean of half their range; a tenth of them will be masked.
    longest = min(width, round(2 * valid * width / 0.9))
    lengths = rng.integers(1, longest, size=num_rows, endpoint=True)
    lengths[0] = width
    sequences = ragged(lengths, rng)
    for start, stop in zip(sequences.offsets, sequences.offsets[1:], strict=False):
        stretch = max((stop - start) // 20, 1)
        for begin in rng.integers(start, stop, size=2):
            # The last token stays valid, as that of a finished response is.
            sequences.mask[begin : min(begin + stretch, stop - 1)] = False
    return sequences


def ragged(lengths: NDArray[np.int64], rng: np.random.Generator) -> Sequences:
    """Sequences of the given lengths without masked tokens."""
    num_tokens = int(lengths.sum())
    return Sequences(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        mask=np.ones(num_tokens, dtype=np.bool_),
        values=rng.normal(size=num_tokens).astype(np.float32),
        rewards=rng.normal(size=len(lengths)).astype(np.float32),
    )


def uneven(num_rows: int, num_tokens: int) -> Sequences:
    """Sequences of very different lengths that add up to a number of tokens."""
    rng = np.random.default_rng(num_tokens)
    cuts = np.sort(rng.choice(np.arange(1, num_tokens), size=num_rows - 1, replace=False))
    return ragged(np.diff(np.concatenate([[0], cuts, [num_tokens]])), rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Sequences as a rectangle of zeros where nothing is."""

    mask: Tensor
    """Shape [B, T]."""
    values: Tensor
    """Shape [B, T]."""
    rewards: Tensor
    """Reward per token, shape [B, T]."""

    @classmethod
    def of(cls, sequences: Sequences, *, dtype: torch.dtype, device: str) -> Padded:
        """Pad to the longest sequence."""
        lengths = torch.from_numpy(np.diff(sequences.offsets))
        inside = torch.arange(int(lengths.max())) < lengths[:, None]
        rewards = np.zeros_like(sequences.values)
        rewards[sequences.last_valid()] = sequences.rewards

        def pad(flat: NDArray[np.float32] | NDArray[np.bool_]) -> Tensor:
            padded = torch.zeros(inside.shape, dtype=dtype)
            padded[inside] = torch.from_numpy(flat).to(dtype)
            return padded.to(device)

        return cls(mask=pad(sequences.mask), values=pad(sequences.values), rewards=pad(rewards))


def padded_loop(padded: Padded) -> tuple[Tensor, Tensor]:
    """Advantages and returns step by step: a few operations on a column of all rows each."""
    values, rewards = padded.values * padded.mask, padded.rewards * padded.mask
    later = next_value = torch.zeros_like(values[:, 0])
    steps = []
    for step in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, step] + GAMMA * next_value - values[:, step]
        later = delta + GAMMA * LAM * later
        next_value = values[:, step]
        steps.append(later)
    advantages = torch.stack(steps[::-1], dim=1)
    return advantages, advantages + values


def token_loop(sequences: Sequences, *, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Advantages and returns token by token, over sequences one after another."""
    values = torch.from_numpy(sequences.values).to(device=device, dtype=dtype)
    rewards = torch.zeros_like(values)
    last = torch.from_numpy(sequences.last_valid()).to(device)
    rewards[last] = torch.from_numpy(sequences.rewards).to(device=device, dtype=dtype)
    advantages = torch.zeros_like(values)
    bounds = sequences.offsets.tolist()
    for start, stop in itertools.pairwise(bounds):
        later = next_value = torch.zeros((), dtype=dtype, device=device)
        for token in range(stop - 1, start - 1, -1):
            delta = rewards[token] + GAMMA * next_value - values[token]
            later = delta + GAMMA * LAM * later
            next_value = values[token]
            advantages[token] = later
    return advantages, advantages + values


def distance(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Largest difference of two results, over the larger of 1 and what is expected."""
    gaps = np.abs(found.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))
    return float(gaps.max())
