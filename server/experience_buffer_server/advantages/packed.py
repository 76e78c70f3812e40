"""A launch's experiences without padding, and the way between raw bytes and packed tensors.

Only valid (unmasked) tokens are kept: what stands in a masked slot can't reach a result, because it
isn't there. Members of a group and groups of a launch lie one after another.

Legend: B experiences, G groups, N packed tokens, D dense tokens (masked ones included).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import as_float32
from .values import FLOAT_DTYPES, MASK_DTYPES, Column, ExperienceInput
from .voting import elect_voters

# Masks are only compared with zero, which a signed integer of the same size answers as well.
_MASK_TORCH_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT_TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The experiences of one launch, packed. Immutable; it can be shared between threads."""

    group_offsets: tuple[int, ...]
    """Group g holds experiences `group_offsets[g]` to `group_offsets[g + 1]`, length G + 1."""
    voters: tuple[int, ...]
    """Per experience, the experience whose reward is its run's vote, length B."""
    dense_offsets: tuple[int, ...]
    """Experience b holds dense tokens `dense_offsets[b]` to `dense_offsets[b + 1]`."""
    max_distance: int
    """Largest element of `distances`; 0 for a batch without tokens."""
    positions: Tensor
    """Dense position of each packed token, shape [N], int64; stays on the host."""
    rewards: Tensor
    """Scalar reward, rounded to float32, shape [B], float64; 0 where a token-level one is used."""
    bootstraps: Tensor
    """Value after the last token, shape [B], float64; 0 unless truncated and given."""
    offsets: Tensor
    """Experience b holds packed tokens `offsets[b]` to `offsets[b + 1]`, shape [B + 1], int64."""
    distances: Tensor
    """Dense distance to the experience's next valid token, shape [N], int64; 0 at its last."""
    token_rewards: Tensor | None
    """Token-level rewards, shape [N], float64; 0 where an experience has none. None: nobody has."""
    values: Tensor | None
    """Critic's values, shape [N], float64; None where the estimator reads none."""
    problems: dict[int, str]
    """What is wrong with experiences whose tensors hold a number that had to be replaced by 0."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.distances.numel()

    def per_token(self, per_experience: Tensor) -> Tensor:
        """Repeat a tensor of shape [B] for each packed token, shape [N]."""
        return per_experience.repeat_interleave(self.offsets.diff(), output_size=self.num_tokens)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with its computing columns on a device, moved in one transfer."""
        if device.type == "cpu":
            return self
        columns = [self.rewards, self.bootstraps, self.offsets, self.distances]
        optional = [column for column in (self.token_rewards, self.values) if column is not None]
        moved = iter(transfer([*columns, *optional], device=device))
        return replace(
            self,
            rewards=next(moved),
            bootstraps=next(moved),
            offsets=next(moved),
            distances=next(moved),
            token_rewards=None if self.token_rewards is None else next(moved),
            values=None if self.values is None else next(moved),
        )


def transfer(columns: Sequence[Tensor], *, device: torch.device) -> list[Tensor]:
    """Move tensors of eight-byte dtypes to a device as one buffer, pinned where that helps."""
    staged = torch.cat([column.view(torch.int64) for column in columns])
    if device.type == "cuda":
        staged = staged.pin_memory()
    moved = staged.to(device, non_blocking=True)
    parts = torch.split_with_sizes(moved, [column.numel() for column in columns])
    return [part.view(column.dtype) for part, column in zip(parts, columns, strict=True)]


def pack(
    groups: Sequence[Sequence[ExperienceInput]],
    *,
    token_level_rewards: bool = True,
    values: bool = True,
    votes: bool = True,
) -> PackedBatch:
    """Pack checked groups from their raw bytes, on the host.

    Args:
        groups: Members per group; each passed `checks.check_group`.
        token_level_rewards: Whether to read token-level rewards.
        values: Whether to read values, which every member then has.
        votes: Whether runs vote; otherwise each experience is its own voter.

    Returns:
        The batch, on the CPU.

    Raises:
        GroupError: A run's vote isn't defined; see `voting.elect_voters`.
    """
    members = [member for group in groups for member in group]
    group_offsets = (0, *itertools.accumulate(map(len, groups)))
    elected = (elect_voters(group) if votes else range(len(group)) for group in groups)
    voters = [start + v for start, of in zip(group_offsets, elected, strict=False) for v in of]
    masks = [member.mask for member in members]
    dense_lengths = [mask.num_bytes // MASK_DTYPES[mask.dtype] for mask in masks]
    dense_offsets = (0, *itertools.accumulate(dense_lengths))
    positions = _join(masks, dense_lengths, torch.bool, decode=_decode_mask).nonzero().view(-1)
    offsets = torch.searchsorted(positions, torch.tensor(dense_offsets))
    distances = _distances(positions, offsets)
    rows = torch.arange(len(members)).repeat_interleave(offsets.diff())
    problems: dict[int, str] = {}
    columns = [member.token_level_reward if token_level_rewards else None for member in members]
    token_rewards = packed_values = None
    bootstraps = torch.zeros(len(members), dtype=torch.float64)
    if any(column is not None for column in columns):
        dense = _join(columns, dense_lengths, torch.float64, decode=_decode_float)
        label = "token_level_reward at a valid token"
        token_rewards = _finite(dense[positions], rows, label, problems)
    if values:
        dense, shifts, bootstraps = _dense_values(members, dense_offsets)
        label = "values at a valid token"
        packed_values = _finite(dense[positions + shifts[rows]], rows, label, problems)
        label = "bootstrap value (the last of values)"
        bootstraps = _finite(bootstraps, torch.arange(len(members)), label, problems)
    return PackedBatch(
        group_offsets=group_offsets,
        voters=tuple(voters),
        dense_offsets=dense_offsets,
        max_distance=int(distances.max()) if distances.numel() else 0,
        positions=positions,
        rewards=_scalars(members, columns),
        bootstraps=bootstraps,
        offsets=offsets,
        distances=distances,
        token_rewards=token_rewards,
        values=packed_values,
        problems=problems,
    )


def _scalars(members: Sequence[ExperienceInput], columns: Sequence[Column | None]) -> Tensor:
    """Rewards of the experiences without a token-level one in `columns`, 0 for the others."""
    scalars = [
        as_float32(member.reward) if column is None and member.reward is not None else 0.0
        for member, column in zip(members, columns, strict=True)
    ]
    return torch.tensor(scalars, dtype=torch.float64)


def _distances(positions_N: Tensor, offsets: Tensor) -> Tensor:
    distances_N = torch.zeros_like(positions_N)
    distances_N[:-1] = positions_N.diff()
    last = offsets[1:][offsets.diff() > 0] - 1
    distances_N[last] = 0
    return distances_N


def _dense_values(
    members: Sequence[ExperienceInput], dense_offsets: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Join values of T or T + 1 elements; also return their shifts and the bootstraps, [B]."""
    columns = [member.values for member in members]
    lengths = [c.num_bytes // FLOAT_DTYPES[c.dtype] if c is not None else 0 for c in columns]
    dense = _join(columns, lengths, torch.float64, decode=_decode_float)
    ends = list(itertools.accumulate(lengths))
    shifts = [
        end - length - start
        for end, length, start in zip(ends, lengths, dense_offsets, strict=False)
    ]
    bootstraps = torch.zeros(len(members), dtype=torch.float64)
    given = [b for b, member in enumerate(members) if is_bootstrapped(member)]
    bootstraps[given] = dense[[ends[b] - 1 for b in given]]
    return dense, torch.tensor(shifts, dtype=torch.int64), bootstraps


def is_bootstrapped(member: ExperienceInput) -> bool:
    """Return whether the experience was truncated and brought a bootstrap value."""
    if not member.truncated or member.values is None:
        return False
    num_tokens = member.mask.num_bytes // MASK_DTYPES[member.mask.dtype]
    return member.values.num_bytes // FLOAT_DTYPES[member.values.dtype] > num_tokens


def all_finite(values: Tensor) -> bool:
    """Return whether every element is finite in float32; one pass, no temporary tensor."""
    if values.numel() == 0:
        return True
    lowest, highest = values.aminmax()
    # A NaN becomes both extremes and fails both comparisons.
    return bool(lowest >= _FLOAT32.min) and bool(highest <= _FLOAT32.max)


def _finite(values: Tensor, rows: Tensor, label: str, problems: dict[int, str]) -> Tensor:
    """Replace what isn't finite in float32 by 0 and name its experiences in `problems`."""
    if all_finite(values):
        return values
    bad = ~values.float().isfinite()
    for row in set(rows[bad].tolist()):
        problems.setdefault(row, f"{label} is NaN, infinite or beyond float32")
    return values.masked_fill(bad, 0.0)


def _join(
    columns: Sequence[Column | None],
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    decode: Callable[[bytearray, str], Tensor],
) -> Tensor:
    """Concatenate columns, zeros for absent ones; one decoding per dtype that occurs."""
    by_dtype: dict[str, list[int]] = {}
    for row, column in enumerate(columns):
        if column is not None:
            by_dtype.setdefault(column.dtype, []).append(row)
    joined = torch.zeros(sum(lengths), dtype=dtype)
    for code, rows in by_dtype.items():
        data = bytearray().join(c.data for row in rows if (c := columns[row]) is not None)
        if not data:
            continue
        if len(rows) == len(columns):
            return decode(data, code)
        chosen = torch.zeros(len(columns), dtype=torch.bool)
        chosen[rows] = True
        joined[chosen.repeat_interleave(torch.tensor(lengths))] = decode(data, code)
    return joined


def _decode_mask(data: bytearray, code: str) -> Tensor:
    return torch.frombuffer(data, dtype=_MASK_TORCH_DTYPES[MASK_DTYPES[code]]) != 0


def _decode_float(data: bytearray, code: str) -> Tensor:
    return torch.frombuffer(data, dtype=_FLOAT_TORCH_DTYPES[code]).double()
