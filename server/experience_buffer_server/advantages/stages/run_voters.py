"""Which experiences of a group are steps of one run, and which of them speaks for it.

Reads runs, steps and rewards only. Legend: B experiences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.arrays.values import ExperienceInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of the experiences of a launch."""

    voters: Ints
    """Per experience, the one at the highest step of its run, which votes for it, shape [B]."""
    first_steps: Ints
    """Per experience, the one at the lowest step of its run, shape [B]."""
    next_steps: Ints
    """Per experience, the one at the next step of its run; -1 at the last, shape [B]."""
    conflicts: tuple[tuple[int, int], ...]
    """Experiences at one step of one run, of which one would have to stand for both, but whose
    rewards differ."""


def separate_runs(num_experiences: int) -> Runs:
    """Each experience is a run of its own."""
    own = np.arange(num_experiences, dtype=np.int64)
    last = np.full(num_experiences, -1, dtype=np.int64)
    return Runs(voters=own, first_steps=own, next_steps=last, conflicts=())


def find_runs(
    members: Sequence[ExperienceInput],
    starts_B: Ints,
    *,
    rewards_B: Floats,
    ties: Sequence[Ints],
    every_step: bool,
) -> Runs:
    """Find the runs of a launch's experiences.

    Experiences of a group with the same run are its steps; one whose run is `""` is a run of its
    own. Of several at one step, one stands for all: the one that comes first by `ties`, so that the
    order of members doesn't matter.

    Args:
        members: The experiences of all groups, one after another.
        starts_B: Where the group of each experience starts, shape [B].
        rewards_B: Reward of each experience, shape [B].
        ties: What else of an experience enters its vote, each of shape [B].
        every_step: Whether every step of a run speaks for itself, so that experiences at one step
            must agree everywhere; otherwise only at its highest.
    """
    labels = [member.run for member in members]
    rows = np.array([row for row, label in enumerate(labels) if label], dtype=np.int64)
    alone = separate_runs(len(members))
    if not rows.size:
        return alone
    known: dict[tuple[int, str], int] = {}
    keys = zip(starts_B[rows].tolist(), (labels[row] for row in rows.tolist()), strict=True)
    ids = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    steps = np.array([members[row].step for row in rows.tolist()], dtype=np.int64)
    # By run, then step; members of a step by reward and ties, whichever order they came in.
    order = np.lexsort((*(tie[rows] for tie in ties), rewards_B[rows], steps, ids))
    rows, ids, steps = rows[order], ids[order], steps[order]
    is_run_start = np.diff(ids, prepend=-1) != 0
    is_step_start = is_run_start | (np.diff(steps, prepend=steps[0]) != 0)
    step_of_row = np.cumsum(is_step_start) - 1
    run_of_step = ids[is_step_start]
    speakers = rows[is_step_start]
    is_last_step = np.diff(run_of_step, append=-1) != 0
    voters, first_steps = alone.voters.copy(), alone.first_steps.copy()
    next_steps = alone.next_steps.copy()
    # Runs are sorted by the numbers they got, so a run's number is its index.
    voters[rows] = speakers[is_last_step][ids]
    first_steps[rows] = speakers[np.diff(run_of_step, prepend=-1) != 0][ids]
    next_steps[rows] = np.where(is_last_step, -1, np.roll(speakers, -1))[step_of_row]
    differs = ~is_step_start & (np.diff(rewards_B[rows], prepend=0.0) != 0)
    if not every_step:
        differs &= is_last_step[step_of_row]
    later = np.flatnonzero(differs)
    pairs = np.sort(np.stack([rows[later - 1], rows[later]], axis=1), axis=1)
    return Runs(
        voters=voters,
        first_steps=first_steps,
        next_steps=next_steps,
        conflicts=tuple((one, other) for one, other in pairs.tolist()),
    )
