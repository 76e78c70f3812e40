"""From experiences as they are stored to the arrays of one launch.

The bytes of all members are joined once per dtype and decoded in one piece; no array is made for a
single experience. Legend: B experiences, G groups, D tokens of all experiences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.decoding import (
    FLOAT32,
    Mask,
    Numbers,
    bad_places,
    decode_mask,
    decode_numbers,
)
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.arrays.values import (
    MASK_DTYPES,
    NUMBER_DTYPES,
    Column,
    ExperienceInput,
)
from experience_buffer_server.advantages.plan.specs import Plan
from experience_buffer_server.advantages.stages.reward_shaping import token_reward_sums
from experience_buffer_server.advantages.stages.run_voters import find_runs, separate_runs

from .checks import Reads, reads_of

Members = Sequence[ExperienceInput]


def pack(
    groups: Sequence[Members],
    plan: Plan,
    *,
    batches: Sequence[int] | None,
    places: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Pack checked groups from their raw bytes, on the host.

    Args:
        groups: Members per group; each passed `checks.check_group`.
        plan: Decides what is read.
        batches: Statistics batch of each group, ascending; None: all groups are in one.
        places: Per group, where its members stand in it, for messages; None: all are here.

    Returns:
        The batch. Where a valid token or bootstrap value isn't finite in float32, or a run's vote
        isn't defined, `problems` says so, and what is there can't be computed with.
    """
    reads = reads_of(plan)
    members = list(itertools.chain.from_iterable(groups))
    group_offsets = _offsets([len(group) for group in groups])
    masks = [member.mask for member in members]
    lengths_B = _lengths(masks, MASK_DTYPES)
    offsets = _offsets(lengths_B)
    mask = _join(masks, lengths_B, decode=decode_mask)
    num_valid = _count(mask, offsets)
    num_turns = _turns(members, mask, offsets) if reads.turns else np.ones_like(num_valid)
    given = {name: [getattr(member, name) for member in members] for name in reads.columns}
    columns = {
        name: _join(inputs, lengths_B, decode=decode_numbers)
        for name, inputs in given.items()
        # Without experiences every column is there, and empty.
        if name != "values" and (any(inputs) or not members)
    }
    bootstraps, bootstrapped = np.zeros(len(members)), np.zeros(len(members), dtype=np.bool_)
    if "values" in given and (any(given["values"]) or not members):
        columns["values"], bootstraps, bootstrapped = _values(members, lengths_B)
    rewards, has_token_rewards = _rewards(members, reads)
    alone = separate_runs(len(members))
    starts_B = np.repeat(group_offsets[:-1], np.diff(group_offsets))
    places_B = np.arange(len(members)) - starts_B
    if places is not None:
        places_B = np.array(list(itertools.chain.from_iterable(places)), dtype=np.int64)
    batch = Batch(
        group_offsets=group_offsets,
        batches=_numbered(batches, len(groups)),
        voters=alone.voters,
        first_steps=alone.first_steps,
        next_steps=alone.next_steps,
        places=places_B,
        offsets=offsets,
        mask=mask,
        num_valid=num_valid,
        rewards=rewards,
        has_token_rewards=has_token_rewards,
        num_turns=num_turns,
        baselines=_baselines(members, reads),
        states=_states(members, reads),
        bootstraps=bootstraps,
        bootstrapped=bootstrapped,
        columns=columns,
        problems=_bad_numbers(columns, mask, offsets, bootstraps, places_B),
    )
    return _with_runs(batch, members, starts_B, plan) if reads.votes else batch


def bad_tokens(tokens_D: Numbers, mask: Mask, offsets: Ints) -> Ints:
    """Find the experiences with a valid token that isn't finite in float32, ascending."""
    bad = bad_places(tokens_D, mask)
    return np.unique(np.searchsorted(offsets, bad, side="right") - 1)


def _offsets(lengths: Sequence[int] | Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _lengths(columns: Iterable[Column | None], sizes: dict[str, int]) -> Ints:
    """Elements of each column, 0 where there is none."""
    return np.array(
        [0 if c is None else c.num_bytes // sizes[c.dtype] for c in columns], dtype=np.int64
    )


def _count(marks: Mask, offsets: Ints) -> Ints:
    """Non-zero marks of each experience, shape [B]."""
    bounds, view = offsets.tolist(), marks.view(np.bool_)
    # Much faster than `np.add.reduceat`, which neither vectorises nor knows empty stretches.
    counts = [np.count_nonzero(view[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return np.array(counts, dtype=np.int64)


def _turns(members: Members, mask: Mask, offsets: Ints) -> Ints:
    """Turns as given, else stretches of valid tokens; an experience has at least one."""
    starts = mask.copy()
    starts[1:] &= mask[:-1] ^ 1
    first = offsets[:-1][np.diff(offsets) > 0]
    starts[first] = mask[first]
    stretches = _count(starts, offsets).tolist()
    given = [member.num_turns for member in members]
    turns = [max(s, 1) if g is None else g for g, s in zip(given, stretches, strict=True)]
    return np.array(turns, dtype=np.int64)


def _rewards(members: Members, reads: Reads) -> tuple[Floats, NDArray[np.bool_]]:
    uses_tokens = np.zeros(len(members), dtype=np.bool_)
    if "token_level_reward" in reads.columns:
        uses_tokens[:] = [member.token_level_reward is not None for member in members]
    if "reward" not in reads.fields:
        return np.zeros(len(members)), uses_tokens
    scalars = np.array([member.reward for member in members], dtype=np.float64)
    scalars[uses_tokens] = 0.0
    return _rounded(scalars), uses_tokens


def _baselines(members: Members, reads: Reads) -> Floats:
    if "baseline_reward" not in reads.fields:
        return np.zeros(len(members))
    return _rounded(np.array([member.baseline_reward for member in members], dtype=np.float64))


def _states(members: Members, reads: Reads) -> tuple[str, ...]:
    if "env_state_hash" not in reads.fields:
        return ("",) * len(members)
    return tuple(member.env_state_hash or "" for member in members)


def _rounded(scalars_B: Floats) -> Floats:
    """Round to the nearest float32, -0.0 to 0.0."""
    return scalars_B.astype(np.float32).astype(np.float64) + 0.0


def _with_runs(batch: Batch, members: Members, starts_B: Ints, plan: Plan) -> Batch:
    rewards_B = batch.rewards
    if batch.has_token_rewards.any():
        rewards_B = rewards_B + token_reward_sums(batch)
    scores_steps = getattr(plan.parameters, "turn_rewards", "none") == "steps"
    runs = find_runs(
        members,
        starts_B,
        rewards_B=rewards_B,
        ties=(batch.num_turns, batch.num_valid),
        every_step=scores_steps or plan.spec.runs_in_task,
    )
    conflicts = {
        other: f"experiences {batch.places[one]} and {batch.places[other]} of the group share "
        f"run {members[one].run!r} and step {members[one].step} but have rewards {rewards_B[one]} "
        f"and {rewards_B[other]}; give each rollout its own run, or each step its own number"
        for one, other in runs.conflicts
    }
    return dataclasses.replace(
        batch,
        voters=runs.voters,
        first_steps=runs.first_steps,
        next_steps=runs.next_steps,
        problems=conflicts | batch.problems,
    )


def _numbered(batches: Sequence[int] | None, num_groups: int) -> Ints:
    """Number the batches from 0, without gaps where all groups of one are missing."""
    if batches is None:
        return np.zeros(num_groups, dtype=np.int64)
    numbers = np.asarray(batches, dtype=np.int64)
    return np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0, dtype=np.int64)


def _values(members: Members, lengths_B: Ints) -> tuple[Numbers, Floats, NDArray[np.bool_]]:
    """Values [D] without what comes after the last token; that where it counts, [B]; where."""
    columns = [member.values for member in members]
    absent = np.array([column is None for column in columns], dtype=np.bool_)
    own_lengths_B = np.where(absent, lengths_B, _lengths(columns, NUMBER_DTYPES))
    joined = _join(columns, own_lengths_B, decode=decode_numbers)
    has_extra = own_lengths_B > lengths_B
    extras = (np.cumsum(own_lengths_B) - 1)[has_extra]
    used = has_extra & np.array([member.truncated for member in members], dtype=np.bool_)
    bootstraps = np.zeros(len(members))
    bootstraps[used] = joined[extras[used[has_extra]]]
    return (np.delete(joined, extras) if extras.size else joined), bootstraps, used


def _join(
    columns: Sequence[Column | None],
    lengths_B: Ints,
    *,
    decode: Callable[[bytearray, str], NDArray[Any]],
) -> NDArray[Any]:
    """Concatenate columns, zeros for absent ones; one decoding per dtype that occurs."""
    codes = {column.dtype for column in columns if column is not None}
    parts: list[tuple[NDArray[np.bool_], NDArray[Any]]] = []
    for code in sorted(codes):
        chosen = [c for c in columns if c is not None and c.dtype == code]
        # A bytearray, because compiled loops take writable and read-only arrays for two types.
        data = decode(bytearray().join([column.data for column in chosen]), code)
        if len(chosen) == len(columns):
            return data
        has_code = [c is not None and c.dtype == code for c in columns]
        parts.append((np.array(has_code, dtype=np.bool_), data))
    kinds = [data.dtype for _, data in parts]
    joined = np.zeros(int(lengths_B.sum()), dtype=np.result_type(*kinds) if kinds else np.uint8)
    for has_code_B, data in parts:
        joined[np.repeat(has_code_B, lengths_B)] = data
    return joined


def _bad_numbers(
    columns: dict[str, Numbers], mask: Mask, offsets: Ints, bootstraps_B: Floats, places_B: Ints
) -> dict[int, str]:
    labels = [
        (f"{name} at a valid token", bad_tokens(tokens_D, mask, offsets))
        for name, tokens_D in columns.items()
    ]
    bad = np.flatnonzero(~(np.abs(bootstraps_B) <= FLOAT32.max))
    labels.append(("bootstrap value (the last of values)", bad))
    return {
        row: f"experience {places_B[row]} of the group: {label} is NaN, infinite or beyond "
        "float32; push finite numbers"
        for label, rows in labels
        for row in rows.tolist()
    }
