"""The arithmetic over tokens on a torch device: valid tokens packed, recursions as scans.

Waits for the device happen where the host needs numbers, and nowhere else: `sums`, `square_sums`,
`clip` and `fetch`. Everything that goes in is staged in one buffer and moved at once, when the
first stage needs it; per-experience numbers that later stages bring are moved on their own, and so
are the powers that a scan needs. What is the same for all tokens of an experience
stays on the host (`spread.py`).

Legend: B experiences, R those with valid tokens, N valid tokens, D all tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints, KlTerm, Tokens

from . import cpu_kernels
from .scan import ScanLayout, powers_down, reverse_scan, segment_sums
from .spread import Placed, Spread, is_identity
from .transfers import download, upload

_Array = NDArray[Any]


class TorchTokens:
    """`TokenStages` on a torch device. Not thread-safe.

    Tokens are `Spread`, `Placed`, or tensors of shape [N], float64.
    """

    def __init__(self, batch: Batch, *, device: str) -> None:
        """Prepare for one batch; nothing is moved yet.

        Args:
            batch: The experiences.
            device: Name of the torch device.
        """
        self._batch = batch
        self._device = torch.device(device)
        self._rows = np.flatnonzero(batch.num_valid)
        self._lengths_R = batch.num_valid[self._rows]
        self._num_valid = int(self._lengths_R.sum())
        self._num_tokens = len(batch.mask)
        self._all_valid = self._num_valid == self._num_tokens
        self._packed = ScanLayout.of(self._lengths_R)
        self._staged_rewards_B = batch.rewards
        self._powers_of: dict[float, Tensor] = {}

    @cached_property
    def _spaced(self) -> ScanLayout:
        """As `_packed`, with a slot for each masked token too."""
        return self._packed if self._all_valid else ScanLayout.of(self._spans_R)

    @cached_property
    def _spans_R(self) -> Ints:
        """Tokens of each row, valid or not."""
        return np.diff(self._batch.offsets)[self._rows]

    # Entering: what is moved to the device.

    @cached_property
    def _inputs(self) -> dict[str, Tensor]:
        """All that the batch holds, moved at once, per experience for [R]."""
        ends_R = np.cumsum(self._lengths_R)
        per_row = {
            "lengths": self._lengths_R,
            "starts": ends_R - self._lengths_R,
            "lasts": ends_R - 1,
            "packed_starts": self._packed.starts,
            "spaced_starts": self._spaced.starts,
            "first_tokens": self._batch.offsets[self._rows],
            "rewards": self._staged_rewards_B[self._rows],
            "bootstraps": self._batch.bootstraps[self._rows],
            "has_token_rewards": self._batch.has_token_rewards[self._rows],
        }
        return upload({**per_row, "mask": self._batch.mask, **self._batch.columns}, self._device)

    def _per_row(self, *per_experience_B: Floats) -> list[Tensor]:
        chosen = {str(n): values_B[self._rows] for n, values_B in enumerate(per_experience_B)}
        return list(upload(chosen, self._device).values())

    @cached_property
    def _rows_N(self) -> Tensor:
        rows_R = torch.arange(len(self._rows), device=self._device)
        return rows_R.repeat_interleave(self._inputs["lengths"], output_size=self._num_valid)

    def _per_token(self, per_row_R: Tensor) -> Tensor:
        return per_row_R[self._rows_N]

    @cached_property
    def _positions_N(self) -> Tensor:
        """Where valid tokens lie among all, without asking the device how many there are."""
        tokens_D = torch.arange(self._num_tokens, device=self._device)
        if self._all_valid:
            return tokens_D
        valid_D = self._inputs["mask"] != 0
        ranks_D = torch.where(valid_D, valid_D.cumsum(0) - 1, self._num_valid)
        # All masked tokens go to one place at the end, which is cut off.
        positions = tokens_D.new_empty(self._num_valid + 1)
        positions[ranks_D] = tokens_D
        return positions[:-1]

    @cached_property
    def _packed_slots_N(self) -> Tensor:
        shifts_R = self._inputs["packed_starts"] - self._inputs["starts"]
        tokens_N = torch.arange(self._num_valid, device=self._device)
        return tokens_N + self._per_token(shifts_R)

    @cached_property
    def _spaced_slots_N(self) -> Tensor:
        if self._all_valid:
            return self._packed_slots_N
        shifts_R = self._inputs["spaced_starts"] - self._inputs["first_tokens"]
        return self._positions_N + self._per_token(shifts_R)

    @cached_property
    def _is_last_N(self) -> Tensor:
        is_last_N = torch.zeros(self._num_valid, dtype=torch.bool, device=self._device)
        return is_last_N.index_fill_(0, self._inputs["lasts"], True)

    def _column(self, name: str) -> Tensor:
        """The valid tokens of a column, in the dtype it came in."""
        return self._valid(self._inputs[name])

    def _valid(self, values_D: Tensor) -> Tensor:
        return values_D if self._all_valid else values_D[self._positions_N]

    # Stages.

    def spread(self, scores_B: Floats) -> Tokens:
        """See `TokenStages`."""
        return Spread(scores_B)

    def from_host(self, values_D: Floats) -> Tokens:
        """See `TokenStages`."""
        return self._valid(upload({"": values_D}, self._device)[""])

    def rewards(self, rewards_B: Floats, kl: KlTerm | None) -> Tokens:
        """See `TokenStages`."""
        if kl is None and "token_level_reward" not in self._batch.columns:
            return Placed(rewards_B)
        placed_N = self._place(rewards_B)
        if "token_level_reward" in self._batch.columns:
            has_N = self._per_token(self._inputs["has_token_rewards"])
            placed_N += torch.where(has_N, self._column("token_level_reward").double(), 0.0)
        if kl is not None:
            placed_N -= kl.coefficient * self._kl(kl).double()
        return placed_N

    def returns(self, rewards: Tokens, *, gamma: float, mask_mode: str) -> Tokens:
        """See `TokenStages`."""
        if isinstance(rewards, Placed) and gamma == 1.0:
            return Spread(rewards.rewards_B)
        return self._scan(self._tensor(rewards), gamma, mask_mode)

    def gae(
        self, rewards: Tokens, *, gamma: float, lam: float, mask_mode: str
    ) -> tuple[Tokens, Tokens]:
        """See `TokenStages`.

        In mode `count`, for the next valid token j at distance d:
        `A_i = r_i - v_i + gamma (gamma lam)^(d-1) v_j + (gamma lam)^d A_j`.
        """
        rewards_N, decay = self._tensor(rewards), gamma * lam
        values_N = self._column("values").double()
        bootstraps_N = self._per_token(self._inputs["bootstraps"])
        next_values_N = torch.where(self._is_last_N, bootstraps_N, values_N.roll(-1))
        if mask_mode == "count" and not self._all_valid:
            next_values_N = next_values_N * self._powers(decay)[-self._distances_N]
        deltas_N = rewards_N + gamma * next_values_N - values_N
        advantages_N = self._scan(deltas_N, decay, mask_mode)
        return advantages_N, advantages_N + values_N + 0.0

    def teacher_gap(self, coefficient: float) -> Tokens:
        """See `TokenStages`."""
        gap_N = self._column("teacher_logprobs").double() - self._column("logprobs").double()
        return coefficient * gap_N

    def affine(self, tokens: Tokens, *, shifts_B: Floats, scales_B: Floats) -> Tokens:
        """See `TokenStages`."""
        if is_identity(shifts_B=shifts_B, scales_B=scales_B):
            return tokens
        if isinstance(tokens, Spread):
            return tokens.affine(shifts_B=shifts_B, scales_B=scales_B)
        shifts_R, scales_R = self._per_row(shifts_B, scales_B)
        return (self._tensor(tokens) - self._per_token(shifts_R)) * self._per_token(scales_R)

    def clip(self, tokens: Tokens, bound: float) -> tuple[Tokens, Ints]:
        """See `TokenStages`. Waits for the device."""
        if isinstance(tokens, Spread):
            return tokens.clip(bound, num_valid=self._batch.num_valid)
        values_N = self._tensor(tokens)
        # Whole numbers: differences of their running sum are exact.
        counts = torch.zeros(self._num_valid + 1, dtype=torch.int64, device=self._device)
        counts[1:] = (values_N.abs() > bound).cumsum(0)
        counted_R = counts[self._inputs["lasts"] + 1] - counts[self._inputs["starts"]]
        outside_B = np.zeros_like(self._batch.num_valid)
        outside_B[self._rows] = counted_R.cpu().numpy()
        return values_N.clamp(-bound, bound), outside_B

    def sums(self, tokens: Tokens) -> Floats:
        """See `TokenStages`. Waits for the device.

        Of a `Spread` too: the same numbers as a tensor have to have the same sum.
        """
        return self._row_sums(self._tensor(tokens))

    def square_sums(self, tokens: Tokens, centres_B: Floats) -> Floats:
        """See `TokenStages`. Waits for the device."""
        (centres_R,) = self._per_row(centres_B)
        gaps_N = self._tensor(tokens) - self._per_token(centres_R)
        return self._row_sums(gaps_N * gaps_N)

    # Leaving: what is moved to the host.

    def fetch(self, tokens: Tokens, others: Tokens | None) -> tuple[NDArray[np.float32], ...]:
        """See `TokenStages`. Waits for the device."""
        asked = [tokens] if others is None or others is tokens else [tokens, others]
        fetched = self._fetch(asked, torch.float32)
        return tuple(fetched if others is None else (fetched[0], fetched[-1]))

    def exact(self, tokens: Tokens) -> Floats:
        """See `TokenStages`. Waits for the device."""
        result: Floats = self._fetch([tokens], torch.float64)[0]
        return result

    def _fetch(self, asked: list[Tokens], dtype: torch.dtype) -> list[_Array]:
        computed = [self._tensor(tokens) for tokens in asked if not isinstance(tokens, Spread)]
        moved: list[_Array] = []
        if computed:
            moved = list(download(torch.stack([self._dense(each, dtype) for each in computed])))
        return [
            self._fill(tokens, dtype) if isinstance(tokens, Spread) else moved.pop(0)
            for tokens in asked
        ]

    def _dense(self, values_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Zero where a token is masked, shape [D]."""
        if self._all_valid:
            return values_N.to(dtype)
        dense_D = torch.zeros(self._num_tokens, dtype=dtype, device=self._device)
        dense_D[self._positions_N] = values_N.to(dtype)
        return dense_D

    def _fill(self, tokens: Spread, dtype: torch.dtype) -> _Array:
        batch = self._batch
        result = np.empty(self._num_tokens, np.float32 if dtype == torch.float32 else np.float64)
        rows = np.arange(len(batch.num_valid))
        cpu_kernels.spread(
            rows, batch.offsets, batch.mask, batch.num_valid, tokens.scores_B, result
        )
        return result

    # Parts of the stages.

    def _tensor(self, tokens: Tokens) -> Tensor:
        """Any tokens as a tensor, shape [N]."""
        if isinstance(tokens, Spread):
            return self._per_token(*self._per_row(tokens.scores_B))
        if isinstance(tokens, Placed):
            return self._place(tokens.rewards_B)
        assert isinstance(tokens, Tensor)
        return tokens

    def _place(self, rewards_B: Floats) -> Tensor:
        """Scalars on last valid tokens, in a tensor of its own, shape [N]."""
        if "_inputs" not in self.__dict__:
            self._staged_rewards_B = rewards_B  # nothing has been moved: these go along
        staged = rewards_B is self._staged_rewards_B
        rewards_R = self._inputs["rewards"] if staged else self._per_row(rewards_B)[0]
        placed_N = torch.zeros(self._num_valid, dtype=torch.float64, device=self._device)
        placed_N[self._inputs["lasts"]] = rewards_R
        return placed_N

    def _kl(self, kl: KlTerm) -> Tensor:
        kl_N = self._column("logprobs").float() - self._column("ref_logprobs").float()
        if kl.estimator == "k2":
            kl_N = kl_N.square() * 0.5
        elif kl.estimator == "k3":
            kl_N = (-kl_N).exp() - 1.0 + kl_N
        return kl_N.clamp(-kl.clip, kl.clip) if kl.clip > 0.0 else kl_N

    @cached_property
    def _distances_N(self) -> Tensor:
        """How many tokens further the experience's next valid one is; 1 at its last."""
        distances_N = self._positions_N.roll(-1) - self._positions_N
        return torch.where(self._is_last_N, 1, distances_N)

    def _powers(self, base: float) -> Tensor:
        """Powers of a base, from the longest row's tokens down to 0: `[-1 - n]` is the n-th."""
        if base not in self._powers_of:
            powers = powers_down(base, int(self._spans_R.max(initial=0)))
            self._powers_of[base] = upload({"": powers}, self._device)[""]
        return self._powers_of[base]

    def _scan(self, terms_N: Tensor, base: float, mask_mode: str) -> Tensor:
        """Solve the recursion; in mode `count` a masked token is a step too."""
        spaced = mask_mode == "count"
        return reverse_scan(
            terms_N,
            slots_N=self._spaced_slots_N if spaced else self._packed_slots_N,
            powers_K=self._powers(base)[:-1],
            layout=self._spaced if spaced else self._packed,
        )

    def _row_sums(self, values_N: Tensor) -> Floats:
        """Sums in an order that depends on the row alone, unlike atomic additions."""
        sums_R = segment_sums(
            values_N,
            slots_N=self._packed_slots_N,
            starts_R=self._inputs["packed_starts"],
            layout=self._packed,
        )
        sums_B = np.zeros(len(self._batch.num_valid))
        sums_B[self._rows] = sums_R.cpu().numpy()
        return sums_B
