"""The arithmetic over tokens: what each device has to offer to the stages.

The stages (`launch.py`) decide on scalars, on the host; only what touches every token is here, once
for CPUs (`cpu_tokens.py`, compiled loops) and once for devices (`torch_tokens.py`). Both give the
same numbers: to 1e-11 in float64 on the CPU, to 1e-5 on a GPU.

Legend: B experiences, D tokens of all experiences one after another, masked ones included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tokens = Any
"""A number per token, in whatever form a device keeps it: opaque to everything but the
`TokenStages` that made it. Never changed once made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlTerm:
    """The divergence from the reference policy that is subtracted from each token's reward."""

    coefficient: float
    estimator: str
    """`k1`, `k2` or `k3`."""
    clip: float
    """The KL of a token is clamped to [-clip, clip]; 0: not."""


class TokenStages(Protocol):
    """One batch on one device. Not thread-safe.

    Every method that returns `Tokens` returns new ones or its argument; masked slots never reach an
    unmasked one, whatever they hold. An experience's tokens, sums and counts depend on that
    experience alone, in every bit: not on its neighbours, nor on how many threads work.
    """

    def spread(self, scores_B: Floats) -> Tokens:
        """Each token its experience's score."""

    def from_host(self, values_D: Floats) -> Tokens:
        """Numbers that were computed on the host, shape [D]; masked slots may hold anything."""

    def rewards(self, rewards_B: Floats, kl: KlTerm | None) -> Tokens:
        """Place the rewards on tokens.

        The scalar on each experience's last valid token, plus its token-level reward, minus the KL
        term (in float32, as upstream) on every valid token.
        """

    def returns(self, rewards: Tokens, *, gamma: float, mask_mode: str) -> Tokens:
        """`R_t = r_t + gamma R_{t+1}`.

        Over valid tokens (`skip`), or over all up to the last valid one, where masked ones are
        steps without reward and value (`count`).
        """

    def gae(
        self, rewards: Tokens, *, gamma: float, lam: float, mask_mode: str
    ) -> tuple[Tokens, Tokens]:
        """Advantages and returns by the batch's values and bootstraps."""

    def teacher_gap(self, coefficient: float) -> Tokens:
        """`coefficient * (teacher_logprobs - logprobs)`."""

    def affine(self, tokens: Tokens, *, shifts_B: Floats, scales_B: Floats) -> Tokens:
        """`(x - shift) * scale`, with one shift and scale per experience."""

    def clip(self, tokens: Tokens, bound: float) -> tuple[Tokens, Ints]:
        """Clamped to [-bound, bound]; also how many valid tokens lay outside, per experience."""

    def sums(self, tokens: Tokens) -> Floats:
        """Sum over the valid tokens of each experience, shape [B], float64, on the host."""

    def square_sums(self, tokens: Tokens, centres_B: Floats) -> Floats:
        """Sum of `(x - centre)^2` over the valid tokens of each experience, shape [B], host."""

    def fetch(self, tokens: Tokens, others: Tokens | None) -> tuple[NDArray[np.float32], ...]:
        """Bring one or two results to the host, in one transfer.

        Float32, shape [D], exactly +0.0 in masked slots. Twice the same array where both are the
        same tokens.
        """

    def exact(self, tokens: Tokens) -> Floats:
        """Like `fetch`, but in float64 as far as tokens are kept in it: for checks."""
