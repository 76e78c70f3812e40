"""Typed parameters of the estimators and of the stages around them, with defaults and bounds.

One frozen dataclass per estimator, put together from those of the stages it goes through. Nothing
here loads NumPy or torch: configuration is validated by a process that never computes. What each
stage does is told where it is computed; the order of the stages is in `launch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parameter_checks import (
    LARGE,
    ParameterError,
    choice,
    count,
    epsilon,
    number,
    switch,
)

_LEVELS = ("none", "group", "batch")
_REWARD_NORM = ("reward_norm_mean", "reward_norm_std")
_ADVANTAGE_NORM = ("advantage_norm_mean", "advantage_norm_std")


def _levels(parameters: BatchParameters) -> set[str]:
    """The levels at which an estimator's configured normalisations take statistics."""
    return {getattr(parameters, name, "none") for name in (*_REWARD_NORM, *_ADVANTAGE_NORM)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParameters:
    """Which experiences share the statistics of a batch, where any stage takes such statistics."""

    batch_size: int = count(64, minimum=1, maximum=65_536)
    """Groups (or experiences, where nothing needs groups) whose statistics are taken together."""
    batch_wait_seconds: float = number(10.0, maximum=86_400.0)
    """After this time, counted from the first, a smaller batch is computed; 0: wait for all."""
    masked_votes: bool = switch(True)
    """Whether a run without a valid token votes in the statistics of its group and of others."""

    @property
    def uses_groups(self) -> bool:
        """Whether a stage needs all members of a group at once."""
        return "group" in _levels(self) or getattr(self, "turn_rewards", "none") == "steps"

    @property
    def uses_batch(self) -> bool:
        """Whether a stage takes statistics over a batch of groups or experiences."""
        return "batch" in _levels(self) or getattr(self, "cross_batch", "none") != "none"

    @property
    def uses_running_moments(self) -> bool:
        """Whether the moments of everything computed before are used."""
        return getattr(self, "running_norm", "none") != "none"

    def check(self) -> None:
        """Raise `ParameterError` where values that are fine alone contradict one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageParameters(BatchParameters):
    """Stages after the estimator, over the advantages of valid tokens (`normalise.py`)."""

    advantage_norm_mean: str = choice("none", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = choice("none", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""
    advantage_norm_leave_one_out: bool = switch(False, only_with=_ADVANTAGE_NORM)
    """A token's own advantage is left out of its mean."""
    advantage_norm_ddof: int = count(1, maximum=1, only_with=_ADVANTAGE_NORM)
    """The standard deviation divides by n - ddof."""
    advantage_norm_eps: float = epsilon(1e-8, only_with=_ADVANTAGE_NORM)
    """Added to the standard deviation."""
    advantage_clip: float = number(0.0)
    """Advantages are clamped to [-c, c]; 0: not."""
    cross_batch: str = choice("none", "none", "mean", "mean_std")
    """Normalise once more over all tokens of the batch, ddof 0, variance at least 1e-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParameters(AdvantageParameters):
    """Stages over the scalar reward of each experience (`shaping.py`, `moments.py`)."""

    reward_bias: float = number(0.0, minimum=-LARGE)
    """Subtracted from, or added to, each reward before it is scaled."""
    reward_bias_sign: str = choice("subtract", "subtract", "add")
    """`(r - bias) * scale` or `(r + bias) * scale`."""
    reward_scale: float = number(1.0, minimum=-LARGE)
    """Each reward is multiplied by it."""
    turn_rewards: str = choice("none", "none", "steps", "concatenated")
    """`steps`: `R_k = r_k + d R_{k+1}` over a run; `concatenated`: `r d^(turns - 1)`."""
    turn_discount: float = number(1.0, maximum=1.0, only_with=("turn_rewards",))
    """d: discount per turn."""
    overlong_penalty: float = number(0.0)
    """Most that a response is penalised per `overlong_buffer` tokens too many; 0: not."""
    overlong_buffer: int = count(0, only_with=("overlong_penalty",))
    """Tokens before the limit over which the penalty grows."""
    max_response_tokens: int = count(0, only_with=("overlong_penalty",))
    """The limit of a response's valid tokens; needed with `overlong_penalty`."""
    running_norm: str = choice("none", "none", "std", "mean_std")
    """Divide by the standard deviation of all scores so far, after subtracting their mean or not."""
    reward_clip: float = number(0.0)
    """Rewards are clamped to [-c, c] after shaping; 0: not."""
    reward_norm_mean: str = choice("none", *_LEVELS)
    """Over which rewards the mean to subtract is taken."""
    reward_norm_std: str = choice("none", *_LEVELS)
    """Over which rewards the standard deviation to divide by is taken."""
    reward_norm_leave_one_out: bool = switch(False, only_with=_REWARD_NORM)
    """A reward is left out of its own mean."""
    reward_norm_ddof: int = count(1, maximum=1, only_with=_REWARD_NORM)
    """The standard deviation divides by n - ddof."""
    reward_norm_eps: float = epsilon(1e-5, only_with=_REWARD_NORM)
    """Added to the standard deviation."""

    def check(self) -> None:
        """Raise `ParameterError` for what contradicts another parameter, or has no effect."""
        if self.reward_scale == 0:
            raise ParameterError("reward_scale is 0, which makes all rewards equal; choose another")
        if self.overlong_penalty and not (self.overlong_buffer and self.max_response_tokens):
            raise ParameterError(
                "overlong_penalty needs overlong_buffer and max_response_tokens above 0"
            )
        if self.overlong_buffer > self.max_response_tokens:
            raise ParameterError(
                f"overlong_buffer {self.overlong_buffer} exceeds max_response_tokens "
                f"{self.max_response_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceParameters(RewardParameters):
    """Parameters of `reinforce`, and of every estimator that ends in returns per token."""

    gamma: float = number(1.0, maximum=1.0)
    """Discount per step."""
    mask_mode: str = choice("skip", "count", "skip")
    """What a masked token between valid ones is: a step without reward and value, or no step."""
    kl_coef: float = number(0.0)
    """b: `b * KL` is subtracted from each valid token's reward."""
    kl_estimator: str = choice("k1", "k1", "k2", "k3", only_with=("kl_coef",))
    """Which estimate of the divergence from the reference policy."""
    kl_clip: float = number(0.0, only_with=("kl_coef",))
    """The KL of a token is clamped to [-c, c]; 0: not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeParameters(ReinforceParameters):
    """Parameters of `gae`."""

    lam: float = number(1.0, maximum=1.0)
    """Lambda: weight of later temporal differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParameters(ReinforceParameters):
    """Parameters of the estimators that compare the members of a group."""

    zero_variance: str = choice("keep", "keep", "mask", "withhold")
    """Groups whose rewards are all equal: delivered, delivered with an all-zero mask, or discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoParameters(GroupParameters):
    """Parameters of `grpo`."""

    eps: float = epsilon(1e-6)
    """Added to the standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceBaselineParameters(GroupParameters):
    """Parameters of `reinforce_baseline` (REINFORCE++-baseline)."""

    advantage_norm_mean: str = choice("batch", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = choice("batch", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""
    cross_batch: str = choice("mean_std", "none", "mean", "mean_std")
    """Normalise once more over all tokens of the batch, ddof 0, variance at least 1e-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusParameters(ReinforceParameters):
    """Parameters of `reinforce_plus_plus`."""

    advantage_norm_mean: str = choice("batch", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = choice("batch", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpmdParameters(GroupParameters):
    """Parameters of `opmd`."""

    baseline: str = choice("mean", "mean", "logavgexp")
    """`mean`, or `tau (logsumexp(r / tau) - log n)`."""
    tau: float = number(1.0, maximum=1e6, above_minimum=True, only_with=("baseline",))
    """Temperature of `logavgexp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsymreParameters(GroupParameters):
    """Parameters of `asymre`."""

    shift: float = number(-0.1, minimum=-LARGE)
    """Added to the mean that is the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWiseGrpoParameters(GrpoParameters):
    """Parameters of `step_wise_grpo`."""

    divide_by_steps: bool = switch(False)
    """Divide a run's score by its number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GigpoParameters(GrpoParameters):
    """Parameters of `gigpo`."""

    step_weight: float = number(1.0)
    """w: weight of the step advantage."""
    step_discount: float = number(0.95, maximum=1.0)
    """Discount of the returns that are compared at one state."""
    use_std: bool = switch(True)
    """Divide by the standard deviation; else subtract the mean alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpgdParameters(RewardParameters):
    """Parameters of `cpgd`."""

    weight: str = choice("std", "none", "std", "clip_filter")
    """What the centred score is divided or multiplied by."""
    eps: float = epsilon(1e-6)
    """Added to the standard deviation."""
    max_weight: float = number(3.0)
    """Most that `clip_filter` multiplies by."""

    @property
    def uses_batch(self) -> bool:
        """Its scores are compared with those of the batch."""
        return True

    @property
    def uses_groups(self) -> bool:
        """`clip_filter` counts groups without variance."""
        steps = self.turn_rewards == "steps"
        return self.weight == "clip_filter" or steps or "group" in _levels(self)

    def check(self) -> None:
        """Raise `ParameterError` for what contradicts another parameter, or has no effect."""
        # Not super(): a dataclass with slots is another class than the one it was made from.
        RewardParameters.check(self)
        if self.batch_size == 1 and not self.uses_groups:
            raise ParameterError(
                "batch_size is 1, so cpgd would compare each sequence with itself, and every "
                "advantage would be 0; set batch_size to 2 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationParameters(AdvantageParameters):
    """Parameters of `on_policy_distill`."""

    coefficient: float = number(1.0, minimum=-LARGE)
    """c: multiplies the difference of log-probabilities."""
