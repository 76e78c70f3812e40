"""Settings of one consumer of a buffer: what it gets, in which order, how fast and how fresh."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from experience_buffer_server.sampling.limiter import LimiterPlan
from experience_buffer_server.sampling.selectors import Selector, SelectorKind, make_selector

MAX_NAME_CHARS = 64


def spelled(pattern: str, wanted: str) -> AfterValidator:
    """A check that a text has a spelling, which says in words what to give.

    Args:
        pattern: Of the whole text.
        wanted: What it stands for.
    """

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"give {wanted}")
        return text

    return AfterValidator(check)


NAME_WORDS = f"1 to {MAX_NAME_CHARS} letters, digits, '.', '_' and '-'"
Name = Annotated[str, spelled(rf"[A-Za-z0-9._-]{{1,{MAX_NAME_CHARS}}}", NAME_WORDS)]
_MAX_COUNT = 2**63


class Section(BaseModel):
    """A table of settings: unknown keys are errors."""

    # Infinity isn't JSON: settings that hold it could be stored and not be read back.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SelectorSettings(Section):
    """In which order units are chosen."""

    kind: SelectorKind = "fifo"
    """Which unit is next: by age, chance, priority, version, reward or length."""
    key: Literal["priority", "reward", "response_tokens"] = "priority"
    """What `min` and `max` compare; of a group, the mean of its members."""
    exponent: float = Field(1.0, ge=0, le=10)
    """Of `prioritized` and `advantage`: probabilities are in proportion to value ** exponent."""
    decay: float = Field(0.5, gt=0, le=1)
    """Of `staleness`: probabilities are in proportion to decay ** (versions behind)."""
    seed: int | None = Field(None, ge=0, lt=2**64)
    """Makes the choices of one server's life repeatable."""

    def make(self) -> Selector:
        """An empty selector."""
        return make_selector(self.kind, exponent=self.exponent, decay=self.decay, seed=self.seed)


AnySelector = Annotated[
    SelectorSettings,
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]
"""Its table, or its kind alone."""


class LimiterSettings(Section):
    """Keeps pushing and sampling in step; counts are of the consumer's units."""

    min_size: int = Field(1, ge=1, lt=_MAX_COUNT)
    """Fewest units in the buffer for sampling to begin."""
    samples_per_insert: float = Field(1.0, gt=0, le=1e6)
    """How often each unit is to be sampled on average."""
    min_diff: float | None = None
    """Sampling waits while inserts * samples_per_insert - samples would fall below."""
    max_diff: float | None = None
    """Pushes wait while inserts * samples_per_insert - samples would rise above."""
    max_ahead_bytes: int = Field(0, ge=0, lt=_MAX_COUNT)
    """Pushes wait while more payload bytes than this haven't been sampled yet; 0: never."""

    @property
    def plan(self) -> LimiterPlan:
        """What the limiter computes with."""
        return LimiterPlan(
            min_size=self.min_size,
            samples_per_insert=self.samples_per_insert,
            min_diff=-math.inf if self.min_diff is None else self.min_diff,
            max_diff=math.inf if self.max_diff is None else self.max_diff,
            max_ahead_bytes=self.max_ahead_bytes,
        )

    @model_validator(mode="after")
    def _possible(self) -> LimiterSettings:
        if problem := self.plan.problem():
            raise ValueError(problem)
        return self


class StalenessSettings(Section):
    """How stale a unit may be; its version is the lowest of its members."""

    max_lag: int | None = Field(None, ge=0, lt=_MAX_COUNT)
    """Most policy versions behind the published one."""
    max_version_span: int | None = Field(None, ge=0, lt=_MAX_COUNT)
    """Most versions between a unit's lowest and highest."""
    max_age_seconds: float | None = Field(None, gt=0)
    """Oldest age since the push."""
    on_stale: Literal["drop", "keep", "mark"] = "drop"
    """What is too stale when it would be delivered is removed, passed over, or delivered marked."""

    @property
    def window(self) -> str:
        """The bound that policy versions are judged by, as it is set; empty: none is."""
        for name in ("max_lag", "max_version_span"):
            if (bound := getattr(self, name)) is not None:
                return f"{name} = {bound}"
        return ""


class PacingSettings(Section):
    """Admission of new tasks by what the trainer can still use in time."""

    consumer: Name
    """The consumer whose acknowledgements count."""
    max_staleness: int = Field(ge=0, lt=_MAX_COUNT)
    """Most policy versions between a task's start and its use."""
    batch_size: int = Field(ge=1, lt=2**32)
    """Units that the trainer consumes per policy version."""
    max_running: int = Field(0, ge=0, lt=2**32)
    """Most reserved groups at once; 0: any number."""


class ConsumerSettings(Section):
    """A named reader of a buffer."""

    name: Name
    """1 to 64 letters, digits, ".", "_" and "-"."""
    unit: Literal["item", "group"] = "item"
    """What `batch_size` counts: single experiences or whole groups."""
    raw: bool = False
    """It gets experiences as soon as they are stored (groups: whole), before their advantages."""
    selector: AnySelector = SelectorSettings()
    """In which order it gets units."""
    replay: bool = False
    """A unit is delivered again after its acknowledgement, up to `max_times_sampled`."""
    max_times_sampled: int = Field(0, ge=0, lt=2**32)
    """With `replay`: acknowledged deliveries after which a unit is consumed; 0: never."""
    with_replacement: bool = False
    """With `replay`: the same unit may come several times in one batch."""
    limiter: LimiterSettings | None = None
    staleness: StalenessSettings | None = None
    max_deliveries: int = Field(0, ge=0, lt=2**32)
    """Deliveries without an acknowledgement after which a unit is quarantined; 0: any number."""
    max_leased_experiences: int = Field(0, ge=0, lt=_MAX_COUNT)
    """Most experiences leased at once; 0: bounded by the server only."""
    max_leased_bytes: int = Field(0, ge=0, lt=_MAX_COUNT)
    """Most payload bytes leased at once, except that one batch may always be; 0: any."""
    retain_steps: int = Field(0, ge=0, lt=2**32)
    """Newest training steps that can be rewound; 0: all, until they are declared safe."""

    @property
    def samples_per_insert(self) -> float | None:
        """What its limiter counts by; None without one."""
        return None if self.limiter is None else self.limiter.samples_per_insert

    @model_validator(mode="after")
    def _consistent(self) -> ConsumerSettings:
        if not self.replay and (self.max_times_sampled or self.with_replacement):
            raise ValueError(
                "max_times_sampled and with_replacement need replay = true: without it each unit "
                "is consumed by its first acknowledgement"
            )
        if self.raw and self.selector.kind == "advantage":
            raise ValueError('selector "advantage": a raw consumer gets units before they have any')
        if self.limiter is not None and (problem := self._limiter_problem(self.limiter)):
            raise ValueError(problem)
        return self

    def _limiter_problem(self, limiter: LimiterSettings) -> str:
        """Why the limiter could never let pushes go on; empty when it can."""
        times = self.max_times_sampled if self.replay else 1
        if times and limiter.samples_per_insert > times and limiter.max_diff is not None:
            return (
                f"limiter: samples_per_insert {limiter.samples_per_insert:g} can't be reached when "
                f"each unit is sampled at most {times} times; pushes would stop for good"
            )
        return ""
