"""Estimators that look at the steps of runs: one experience per step, several per run.

Legend: B experiences (steps), V runs.
"""

from __future__ import annotations

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import (
    GigpoParameters,
    StepWiseGrpoParameters,
)
from experience_buffer_server.advantages.stages.reward_shaping import (
    discounted_returns,
    voting_rewards,
)
from experience_buffer_server.advantages.stages.votes import Votes, ballot, steps_differ

from .group_relative import Compare, compare_dr_grpo, compare_grpo, compare_votes, grpo_scores


def step_wise_grpo_scores(
    rewards_B: Floats, batch: Batch, parameters: StepWiseGrpoParameters, details: GroupDetails
) -> Floats:
    """GRPO over runs, whose score all their steps get: `(r - mean) / (std + eps)`, or that over k.

    r is a run's reward at its highest step, and k its number of experiences, by which
    `divide_by_steps` has it divided. As `group_relative.Scores`; details get what `compare_votes`
    records.

    Source: Trinity-RFT, `StepWiseGRPOAdvantageFn`.
    """
    scores_B = grpo_scores(rewards_B, batch, parameters, details)
    if not parameters.divide_by_steps:
        return scores_B
    runs = ballot(batch, batch.voters)
    return scores_B / np.bincount(runs.slots, minlength=len(runs.voters))[runs.slots]


def gigpo_scores(
    rewards_B: Floats, batch: Batch, parameters: GigpoParameters, details: GroupDetails
) -> Floats:
    """Advantage of a step's run within the task, plus that of the step within its state.

    `(E - mean) / (std + eps) + w (R - mean) / (std + eps)`. E is the sum of a run's rewards,
    compared over the runs of the group. `R_k = r_k + d R_{k+1}` is the step's discounted return,
    compared over all steps of the group with the same `env_state_hash`; a step whose state occurs
    nowhere else has nothing to be compared with, and its second term is 0. Without `use_std`
    neither term is divided. ddof is 1.

    Where rewards are returns over the steps already (`turn_rewards` is `steps`), E is the one at
    the run's first step and R the step's own: they aren't summed again.

    w is `step_weight`, d `step_discount`. As `group_relative.Scores`; details get what
    `compare_votes` records of the runs, but `zero_variance` also asks that the steps at each state
    have equal returns, unless w is 0.

    Source: Feng et al. 2025 (GiGPO), section 4.
    """
    compare = _comparison(parameters)
    runs = ballot(batch, batch.first_steps)
    totals_B, returns_B = _totals_and_returns(rewards_B, batch, parameters)
    raw_totals_B, raw_returns_B = totals_B, returns_B
    if rewards_B is not batch.rewards or steps_differ(parameters):
        raw_B = voting_rewards(batch, parameters)
        raw_totals_B, raw_returns_B = _totals_and_returns(raw_B, batch, parameters)
    episode_B = compare_votes(
        totals_B[runs.voters][runs.slots],
        totals_B,
        runs,
        details,
        compare=compare,
        raw_B=raw_totals_B,
    )
    if parameters.step_weight == 0:
        return episode_B
    for group in _groups_with_varied_states(raw_returns_B, batch):
        # Runs that earned the same, but not from the same states on, still teach something.
        details[group]["zero_variance"] = False
    return episode_B + parameters.step_weight * _step_scores(returns_B, batch, compare)


def _totals_and_returns(
    rewards_B: Floats, batch: Batch, parameters: GigpoParameters
) -> tuple[Floats, Floats]:
    """E at the first step of each run, and R of each step; each of shape [B]."""
    if steps_differ(parameters):
        return rewards_B, rewards_B
    returns_B = discounted_returns(rewards_B, batch.next_steps, discount=parameters.step_discount)
    return run_totals(rewards_B, batch), returns_B


def run_totals(rewards_B: Floats, batch: Batch) -> Floats:
    """Sum of a run's rewards, correctly rounded, so that runs with the same rewards are equal.

    Several experiences at one step of a run count once. The sums, shape [B], are at the first step
    of each run, and 0 elsewhere.
    """
    # Of several experiences at one step, one is reached from the step before.
    reached_B = np.zeros(len(rewards_B), dtype=np.bool_)
    reached_B[batch.first_steps] = True
    reached_B[batch.next_steps[batch.next_steps >= 0]] = True
    steps = np.flatnonzero(reached_B)
    steps, firsts, votes = _cells(rewards_B, steps, batch.first_steps[steps])
    totals_B = np.zeros(len(rewards_B))
    totals_B[firsts] = votes.sums()
    return totals_B


def _step_scores(returns_B: Floats, batch: Batch, compare: Compare) -> Floats:
    """Scores of steps among those of their group with the same state, 0 where there is one."""
    steps, _, votes = _states(returns_B, batch)
    shared_V = votes.spread(votes.sizes.astype(np.float64)) > 1
    scores_B = np.zeros(len(returns_B))
    scores_B[steps] = np.where(shared_V, compare(votes).scores(votes), 0.0)
    return scores_B


def _groups_with_varied_states(returns_B: Floats, batch: Batch) -> list[int]:
    """The groups with steps that have the same state and different returns."""
    steps, _, votes = _states(returns_B, batch)
    firsts = steps[votes.offsets[:-1][~votes.constant()]]
    groups = np.searchsorted(batch.group_offsets, firsts, side="right") - 1
    return sorted(set(groups.tolist()))


def _states(returns_B: Floats, batch: Batch) -> tuple[Ints, Ints, Votes]:
    """Steps by group and state, as `_cells`; those without a state are left out."""
    numbers: dict[str, int] = {}
    states_B = np.array([numbers.setdefault(s, len(numbers)) for s in batch.states], dtype=np.int64)
    sizes_G = np.diff(batch.group_offsets)
    groups_B = np.repeat(np.arange(len(sizes_G)), sizes_G)
    # What came without a state shares it with nothing.
    known = np.flatnonzero(states_B != numbers.get("", -1))
    return _cells(returns_B, known, (groups_B * len(numbers) + states_B)[known])


def _cells(numbers_B: Floats, rows: Ints, cells: Ints) -> tuple[Ints, Ints, Votes]:
    """Some experiences' numbers by the cell each belongs to.

    Args:
        numbers_B: Number of each experience, shape [B].
        rows: The experiences, shape [V].
        cells: Cell of each of them, shape [V].

    Returns:
        The experiences cell by cell, the cells that occur, and the numbers as their votes.
    """
    order = np.argsort(cells, kind="stable")
    occurring, starts = np.unique(cells[order], return_index=True)
    offsets = np.append(starts, len(order)).astype(np.int64)
    return rows[order], occurring, Votes(numbers_B[rows[order]], offsets)


def _comparison(parameters: GigpoParameters) -> Compare:
    if not parameters.use_std:
        return compare_dr_grpo
    eps = parameters.eps
    return lambda votes: compare_grpo(votes, eps=eps)
