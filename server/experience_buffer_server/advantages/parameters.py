"""Typed parameters of the estimators and of the stages around them, with defaults and bounds.

One frozen dataclass per estimator, put together from those of the stages it goes through. Nothing
here loads NumPy or torch: configuration is validated by a process that never computes. What each
stage does is told where it is computed; the order of the stages is in `launch.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ParameterValue = float | bool | str

_LARGE = 1e9


class ParameterError(ValueError):
    """An estimator's name or parameter isn't acceptable; the message names it and the limit."""


def _number(
    default: float, *, minimum: float = 0.0, maximum: float = _LARGE, above_minimum: bool = False
) -> float:
    bounds = {"minimum": minimum, "maximum": maximum, "above_minimum": above_minimum}
    default_field: float = field(default=default, metadata=bounds)
    return default_field


def _count(default: int, *, minimum: int = 0, maximum: int = 1_000_000_000) -> int:
    bounds = {"minimum": minimum, "maximum": maximum, "whole": True}
    default_field: int = field(default=default, metadata=bounds)
    return default_field


def _switch(default: bool) -> bool:
    default_field: bool = field(default=default, metadata={"switch": True})
    return default_field


def _choice(default: str, *options: str) -> str:
    default_field: str = field(default=default, metadata={"options": options})
    return default_field


_LEVELS = ("none", "group", "batch")
_LEVEL_FIELDS = (
    "reward_norm_mean", "reward_norm_std", "advantage_norm_mean", "advantage_norm_std",
)  # fmt: skip


def _levels(parameters: BatchParameters) -> set[str]:
    """The levels at which an estimator's configured normalisations take statistics."""
    return {getattr(parameters, name, "none") for name in _LEVEL_FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParameters:
    """Which experiences share the statistics of a batch, where any stage takes such statistics."""

    batch_size: int = _count(64, minimum=1, maximum=65_536)
    """Groups (or experiences, where nothing needs groups) whose statistics are taken together."""
    batch_wait_seconds: float = _number(10.0, maximum=86_400.0)
    """After this time, counted from the first, a smaller batch is computed; 0: wait for all."""

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

    advantage_norm_mean: str = _choice("none", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = _choice("none", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""
    advantage_norm_leave_one_out: bool = _switch(False)
    """A token's own advantage is left out of its mean."""
    advantage_norm_ddof: int = _count(1, maximum=1)
    """The standard deviation divides by n - ddof."""
    advantage_norm_eps: float = _number(1e-8, maximum=1.0, above_minimum=True)
    """Added to the standard deviation."""
    advantage_clip: float = _number(0.0)
    """Advantages are clamped to [-c, c]; 0: not."""
    cross_batch: str = _choice("none", "none", "mean", "mean_std")
    """Normalise once more over all tokens of the batch, ddof 0, variance at least 1e-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParameters(AdvantageParameters):
    """Stages over the scalar reward of each experience (`shaping.py`, `moments.py`)."""

    reward_bias: float = _number(0.0, minimum=-_LARGE)
    """Subtracted from, or added to, each reward before it is scaled."""
    reward_bias_sign: str = _choice("subtract", "subtract", "add")
    """`(r - bias) * scale` or `(r + bias) * scale`."""
    reward_scale: float = _number(1.0, minimum=-_LARGE)
    """Each reward is multiplied by it."""
    turn_rewards: str = _choice("none", "none", "steps", "concatenated")
    """`steps`: `R_k = r_k + d R_{k+1}` over a run; `concatenated`: `r d^(turns - 1)`."""
    turn_discount: float = _number(1.0, maximum=1.0)
    """d: discount per turn."""
    overlong_penalty: float = _number(0.0)
    """Most that a response is penalised per `overlong_buffer` tokens too many; 0: not."""
    overlong_buffer: int = _count(0)
    """Tokens before the limit over which the penalty grows."""
    max_response_tokens: int = _count(0)
    """The limit of a response's valid tokens; needed with `overlong_penalty`."""
    running_norm: str = _choice("none", "none", "std", "mean_std")
    """Divide by the standard deviation of all scores so far, after subtracting their mean or not."""
    reward_clip: float = _number(0.0)
    """Rewards are clamped to [-c, c] after shaping; 0: not."""
    reward_norm_mean: str = _choice("none", *_LEVELS)
    """Over which rewards the mean to subtract is taken."""
    reward_norm_std: str = _choice("none", *_LEVELS)
    """Over which rewards the standard deviation to divide by is taken."""
    reward_norm_leave_one_out: bool = _switch(False)
    """A reward is left out of its own mean."""
    reward_norm_ddof: int = _count(1, maximum=1)
    """The standard deviation divides by n - ddof."""
    reward_norm_eps: float = _number(1e-5, maximum=1.0, above_minimum=True)
    """Added to the standard deviation."""

    def check(self) -> None:
        """Raise `ParameterError` where values that are fine alone contradict one another."""
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

    gamma: float = _number(1.0, maximum=1.0)
    """Discount per step."""
    mask_mode: str = _choice("skip", "count", "skip")
    """What a masked token between valid ones is: a step without reward and value, or no step."""
    kl_coef: float = _number(0.0)
    """b: `b * KL` is subtracted from each valid token's reward."""
    kl_estimator: str = _choice("k1", "k1", "k2", "k3")
    """Which estimate of the divergence from the reference policy."""
    kl_clip: float = _number(0.0)
    """The KL of a token is clamped to [-c, c]; 0: not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeParameters(ReinforceParameters):
    """Parameters of `gae`."""

    lam: float = _number(1.0, maximum=1.0)
    """Lambda: weight of later temporal differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParameters(ReinforceParameters):
    """Parameters of the estimators that compare the members of a group."""

    zero_variance: str = _choice("keep", "keep", "mask", "withhold")
    """Groups whose rewards are all equal: delivered, delivered with an all-zero mask, or discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoParameters(GroupParameters):
    """Parameters of `grpo`."""

    eps: float = _number(1e-6, maximum=1.0, above_minimum=True)
    """Added to the standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceBaselineParameters(GroupParameters):
    """Parameters of `reinforce_baseline` (REINFORCE++-baseline)."""

    advantage_norm_mean: str = _choice("batch", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = _choice("batch", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""
    cross_batch: str = _choice("mean_std", "none", "mean", "mean_std")
    """Normalise once more over all tokens of the batch, ddof 0, variance at least 1e-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusParameters(ReinforceParameters):
    """Parameters of `reinforce_plus_plus`."""

    advantage_norm_mean: str = _choice("batch", *_LEVELS)
    """Over which tokens the mean to subtract is taken."""
    advantage_norm_std: str = _choice("batch", *_LEVELS)
    """Over which tokens the standard deviation to divide by is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpmdParameters(GroupParameters):
    """Parameters of `opmd`."""

    baseline: str = _choice("mean", "mean", "logavgexp")
    """`mean`, or `tau (logsumexp(r / tau) - log n)`."""
    tau: float = _number(1.0, maximum=1e6, above_minimum=True)
    """Temperature of `logavgexp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsymreParameters(GroupParameters):
    """Parameters of `asymre`."""

    shift: float = _number(-0.1, minimum=-_LARGE)
    """Added to the mean that is the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWiseGrpoParameters(GrpoParameters):
    """Parameters of `step_wise_grpo`."""

    divide_by_steps: bool = _switch(False)
    """Divide a run's score by its number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GigpoParameters(GrpoParameters):
    """Parameters of `gigpo`."""

    step_weight: float = _number(1.0)
    """w: weight of the step advantage."""
    step_discount: float = _number(0.95, maximum=1.0)
    """Discount of the returns that are compared at one state."""
    use_std: bool = _switch(True)
    """Divide by the standard deviation; else subtract the mean alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpgdParameters(RewardParameters):
    """Parameters of `cpgd`."""

    weight: str = _choice("std", "none", "std", "clip_filter")
    """What the centred score is divided or multiplied by."""
    eps: float = _number(1e-6, maximum=1.0, above_minimum=True)
    """Added to the standard deviation."""
    max_weight: float = _number(3.0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationParameters(AdvantageParameters):
    """Parameters of `on_policy_distill`."""

    coefficient: float = _number(1.0, minimum=-_LARGE)
    """c: multiplies the difference of log-probabilities."""


def checked_parameters(
    name: str, kind: type[BatchParameters], given: Mapping[str, Any]
) -> BatchParameters:
    """Check given values against a parameter class, and fill in its defaults.

    Args:
        name: The estimator's name, for messages.
        kind: Its parameter class.
        given: What differs from the defaults.

    Raises:
        ParameterError: Unknown parameter, wrong type, out of bounds, or contradictory.
    """
    fields = {known.name: known for known in dataclasses.fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            raise ParameterError(
                f"estimator {name!r} has no parameter {key!r}; it has {', '.join(sorted(fields))}"
            )
        checked[key] = _checked(f"{name}.{key}", value, fields[key].metadata)
    parameters = kind(**checked)
    parameters.check()
    return parameters


def _checked(label: str, value: object, limits: Mapping[str, Any]) -> ParameterValue:
    options = limits.get("options")
    if options is not None:
        if not isinstance(value, str) or value not in options:
            raise ParameterError(f"{label} is {value!r}; choose one of {', '.join(options)}")
        return value
    if limits.get("switch"):
        if not isinstance(value, bool):
            raise ParameterError(f"{label} is {value!r}; give true or false")
        return value
    if limits.get("text"):
        if not isinstance(value, str):
            raise ParameterError(f"{label} is {value!r}; give a text")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{label} is {value!r}; give a number")
    low, high, above = limits["minimum"], limits["maximum"], limits.get("above_minimum", False)
    inside = (value > low if above else value >= low) and value <= high
    if not inside or math.isnan(value):
        raise ParameterError(
            f"{label} is {value!r}; it must lie in {'(' if above else '['}{low}, {high}]"
        )
    if not limits.get("whole"):
        return float(value)
    if value != int(value):
        raise ParameterError(f"{label} is {value!r}; give a whole number")
    return int(value)
