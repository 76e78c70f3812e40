"""The experiences of one launch as arrays: ragged, without padding, built from raw bytes.

Members of a group and groups of a launch lie one after another; the tokens of all experiences form
one array, masked ones included, beside one mask.

Legend: B experiences, G groups, D tokens of all experiences one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .token_types import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The experiences of one launch. Immutable; it can be shared between threads."""

    group_offsets: Ints
    """Group g holds experiences `group_offsets[g]` to `group_offsets[g + 1]`, shape [G + 1]."""
    batches: Ints
    """Per group, the statistics batch it belongs to, numbered from 0, ascending, shape [G]."""
    voters: Ints
    """Per experience, the experience that votes for its run, shape [B]. Where nothing compares the
    members of a group, each is a run of its own, here and in the two that follow."""
    first_steps: Ints
    """Per experience, the experience at the lowest step of its run, shape [B]."""
    next_steps: Ints
    """Per experience, the one at the next step of its run; -1 at the last, shape [B]."""
    places: Ints
    """Per experience, its place in its group as it was pushed, where others may have taken no part,
    shape [B]."""
    offsets: Ints
    """Experience b holds tokens `offsets[b]` to `offsets[b + 1]`, shape [B + 1]."""
    mask: NDArray[np.uint8]
    """1 at valid tokens, else 0, shape [D]."""
    num_valid: Ints
    """Valid tokens of each experience, shape [B]."""
    rewards: Floats
    """Scalar reward, rounded to float32, shape [B]; 0 where a token-level one is used instead, or
    none is read. Never -0.0."""
    has_token_rewards: NDArray[np.bool_]
    """Whether an experience's token-level reward is used instead of the scalar, shape [B]."""
    num_turns: Ints
    """Turns of each experience, at least 1, shape [B]; 1 unless the plan reads them."""
    baselines: Floats
    """Baseline reward, rounded to float32, shape [B]; 0 where it isn't read."""
    states: tuple[str, ...]
    """`env_state_hash` of each experience, length B; empty where it isn't read."""
    bootstraps: Floats
    """Value after the last token, shape [B]; 0 unless truncated and given."""
    bootstrapped: NDArray[np.bool_]
    """Whether a bootstrap value is used, shape [B]."""
    columns: dict[str, NDArray[np.float32] | NDArray[np.float64]]
    """Per-token inputs that the plan reads (`token_level_reward`, `values` without bootstraps,
    `logprobs`, `ref_logprobs`, `teacher_logprobs`), each of shape [D]; float64 where any member's
    is, else float32. Masked slots hold anything, valid ones finite numbers."""
    problems: dict[int, str]
    """Why experiences can't be computed, whole sentences; their groups must leave the launch."""
