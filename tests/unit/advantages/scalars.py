"""Groups of experiences with scalar rewards, taken through the host's stages; pinned results.

Legend: a run is named by `run` and numbered by `step`; every experience here has a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.values import ExperienceInput, GroupDetails
from experience_buffer_server.advantages.packing import pack
from experience_buffer_server.advantages.plan.specs import plan
from experience_buffer_server.advantages.stages.reward_shaping import overlong_penalty, turn_rewards
from experience_buffer_server.advantages.stages.votes import Votes

from .builders import experience

Group = Sequence[ExperienceInput]


def step(
    reward: float | None,
    run: str = "",
    number: int = 0,
    *,
    state: str | None = None,
    mask: Sequence[bool] = (True, True),
    token_rewards: Sequence[float] | None = None,
    num_turns: int | None = None,
) -> ExperienceInput:
    """An experience."""
    return experience(
        reward,
        mask,
        token_level_reward=token_rewards,
        dtype="F64",
        run=run,
        step=number,
        env_state_hash=state,
        num_turns=num_turns,
    )


def steps(rewards: Iterable[float], run: str, states: Sequence[str | None] = ()) -> Group:
    """A run of several steps."""
    return [
        step(reward, run, number, state=states[number] if states else None)
        for number, reward in enumerate(rewards)
    ]


def votes_of(groups: Sequence[Sequence[float]]) -> Votes:
    """Votes from one sequence per group."""
    offsets = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return Votes(np.array([v for group in groups for v in group], dtype=np.float64), offsets)


def packed(
    groups: Sequence[Group],
    estimator: str,
    *,
    batches: Sequence[int] | None = None,
    **parameters: Any,
) -> tuple[Batch, Any, GroupDetails]:
    """A launch, its checked parameters, and a record for each group."""
    chosen = plan(estimator, parameters)
    batch = pack(groups, chosen, batches=batches)
    assert not batch.problems, batch.problems
    return batch, chosen.parameters, [{} for _ in groups]


def scored(
    score: Callable[..., Any],
    groups: Sequence[Group],
    estimator: str,
    *,
    batches: Sequence[int] | None = None,
    **parameters: Any,
) -> tuple[list[list[float]], GroupDetails]:
    """Scores of each group's members after the stages up to the estimator's, and the records."""
    batch, checked, details = packed(groups, estimator, batches=batches, **parameters)
    rewards_B = turn_rewards(batch.rewards, batch, checked)
    rewards_B = overlong_penalty(rewards_B, batch, checked)
    scores_B = score(rewards_B, batch, checked, details)
    assert scores_B.dtype == "float64"
    assert scores_B.shape == batch.rewards.shape
    remaining = iter(scores_B.tolist())
    return [[next(remaining) for _ in group] for group in groups], details
