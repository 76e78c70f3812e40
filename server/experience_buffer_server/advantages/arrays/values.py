"""What goes into and comes out of an advantage computation.

Plain values only: no NumPy, no torch, no arithmetic. The process that only builds or reads them
never pays for loading those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOAT_DTYPES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""Safetensors dtype codes of numbers with a fraction, with their size in bytes."""
INTEGER_DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
}  # fmt: skip
"""Those of whole numbers, and of truths."""
WHOLE_DTYPES = {code: size for code, size in INTEGER_DTYPES.items() if code != "BOOL"}
"""Those that ids may have."""
MASK_DTYPES = INTEGER_DTYPES | FLOAT_DTYPES
"""Those that a mask may have."""
NUMBER_DTYPES = FLOAT_DTYPES | INTEGER_DTYPES
"""Those that rewards, values and log-probabilities may have."""

Detail = float | int | str | bool


class GroupError(ValueError):
    """One group can't be computed; the message says which experience and what to send instead."""


@dataclass(frozen=True, slots=True)
class Column:
    """A one-dimensional tensor as it lies in a payload."""

    dtype: str
    """Safetensors dtype code, such as `BOOL` or `BF16`."""
    data: bytes | memoryview
    """Raw little-endian elements, contiguous; never written to."""

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes, whatever the item format of a memoryview."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceInput:
    """What an estimator may read of one experience with T response tokens."""

    reward: float | None
    """Scalar reward, read as float32; None where there is only a token-level one."""
    mask: Column
    """Action mask, length T, any dtype of `MASK_DTYPES`; non-zero marks a valid token."""
    token_level_reward: Column | None = None
    """Reward per token, length T, any dtype of `NUMBER_DTYPES`; read at valid tokens only, as the next four."""
    values: Column | None = None
    """Critic's values, length T, or T + 1 where the last is the bootstrap value."""
    logprobs: Column | None = None
    """Log-probabilities under the policy that sampled, length T."""
    ref_logprobs: Column | None = None
    """Log-probabilities under the reference policy, length T."""
    teacher_logprobs: Column | None = None
    """Log-probabilities under a teacher, length T."""
    baseline_reward: float | None = None
    """Reward of the greedy response to the same prompt, for `remax`."""
    env_state_hash: str | None = None
    """The environment's state before this step, for `gigpo`."""
    truncated: bool = False
    """Whether generation stopped at a limit, so that the bootstrap value counts."""
    run: str = ""
    """Experiences of a group with the same run vote once; `""` is a run of its own."""
    step: int = 0
    """Position within the run; the reward at the highest step is the run's vote."""
    num_turns: int | None = None
    """Turns of a concatenated sequence; None: as many as its mask has stretches of valid tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceAdvantages:
    """What was computed for one experience."""

    advantages: bytes | memoryview
    """Float32 little-endian, length T, exactly zero where the mask is zero."""
    returns: bytes | memoryview
    """Float32 little-endian, length T, exactly zero where the mask is zero."""
    singleton: bool = False
    """The experience's run was the only vote of its group: there was nothing to compare with."""
    zero_mask: bool = False
    """No token is valid, so everything is zero."""
    bootstrapped: bool = False
    """A bootstrap value entered the computation."""
    magnitude: float = 0.0
    """Mean of |advantage| over its response tokens, masked ones included."""
    mean: float = 0.0
    """Mean advantage over its valid tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A group that was computed."""

    items: tuple[ExperienceAdvantages, ...]
    """One per experience, in the order of the group's experiences."""
    details: dict[str, Detail] = field(default_factory=dict)
    """What was used: `estimator`, `parameters.NAME` for those that differ from their defaults,
    `members`; with group statistics `votes`, `mean`, `std`, `zero_variance`, `singleton`; with
    those of a batch `batch_groups`, `batch_members` and its moments, to which the server adds
    `batch_id`; with running moments `running_count`, `running_mean`, `running_std`; with clips
    `reward_clip_fraction`, `advantage_clip_fraction`."""


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that can't be computed; its neighbours in the launch were."""

    error: str
    """Which experience, what is wrong with it, and what to send instead."""


GroupDetails = list[dict[str, Detail]]
"""Per group of a launch, what is recorded with its result; the stages add to it."""
