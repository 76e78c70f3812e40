"""Tokens that are known without looking at them: one number per experience.

Most estimators give all tokens of an experience the same advantage. Such results stay one number
per experience on the host until they are fetched, whatever the device: no kernel, no transfer.

Legend: B experiences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experience_buffer_server.advantages.arrays.token_types import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Every valid token of an experience has the experience's score."""

    scores_B: Floats

    def affine(self, *, shifts_B: Floats, scales_B: Floats) -> Spread:
        """`(x - shift) * scale`."""
        return Spread((self.scores_B - shifts_B) * scales_B)

    def clip(self, bound: float, *, num_valid: Ints) -> tuple[Spread, Ints]:
        """Clamped to [-bound, bound], and the valid tokens outside, shape [B]."""
        outside_B = np.where(np.abs(self.scores_B) > bound, num_valid, 0)
        return Spread(np.clip(self.scores_B, -bound, bound)), outside_B

    def sums(self, *, num_valid: Ints) -> Floats:
        """Sum over valid tokens, shape [B]; what an experience without any has is meaningless."""
        return np.where(num_valid > 0, self.scores_B, 0.0) * num_valid

    def square_sums(self, centres_B: Floats, *, num_valid: Ints) -> Floats:
        """Sum of `(x - centre)^2` over valid tokens, shape [B]."""
        gaps_B = np.where(num_valid > 0, self.scores_B - centres_B, 0.0)
        return gaps_B * gaps_B * num_valid


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Each experience's scalar reward on its last valid token, nothing on the others.

    Without a discount the return of every token is the reward, a `Spread`.
    """

    rewards_B: Floats


def is_identity(*, shifts_B: Floats, scales_B: Floats) -> bool:
    """Return whether `(x - shift) * scale` is x for every experience."""
    return not shifts_B.any() and bool((scales_B == 1.0).all())
