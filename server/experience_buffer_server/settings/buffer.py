"""Settings of one buffer: how it groups, computes, delivers, and what bounds it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from experience_buffer_server import advantages
from experience_buffer_server.advantages import Plan
from experience_buffer_server.advantages.experience_inputs import Needs
from experience_buffer_server.advantages.plan import custom
from experience_buffer_server.settings.consumer import (
    AnySelector,
    ConsumerSettings,
    PacingSettings,
    Section,
    SelectorSettings,
)

KIBI = 1024
MEBI = 1024 * KIBI
GIBI = 1024 * MEBI
MAX_GROUP_SIZE = 1_000_000
MIN_PAYLOAD_BYTES = 200
"""No payload of an experience is smaller: its metadata alone takes about as much."""
MAX_CONSUMERS = 64
NO_ARCHIVE = (
    "an archive is files beside a store on a disk, and this one is in memory; serve without --memory, "
    "or leave the archive out"
)


class AdvantageSettings(BaseModel):
    """What is computed when a group is whole; keys beside `estimator` are its parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    estimator: str = ""
    """Empty: nothing is computed."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"estimator": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> AdvantageSettings:
        if self.plan is None and self.parameters:
            raise ValueError(f"parameters {sorted(self.parameters)} without an estimator")
        return self

    @cached_property
    def plan(self) -> Plan | None:
        """The estimator with its checked parameters; None: nothing is computed."""
        if not self.estimator:
            return None
        return advantages.plan(self.estimator, self.parameters, custom.declared())

    @cached_property
    def needs(self) -> Needs | None:
        """What the estimator asks of experiences; None: nothing is computed."""
        return None if self.plan is None else Needs(self.plan)

    @property
    def parameters(self) -> dict[str, Any]:
        """The estimator's parameters as given."""
        return dict(self.model_extra or {})

    @property
    def checked_parameters(self) -> dict[str, Any]:
        """The same as the estimator gets them: a whole number may stand for a real one."""
        assert self.plan is not None
        return {name: getattr(self.plan.parameters, name) for name in self.parameters}


class RetentionSettings(Section):
    """What leaves a buffer by itself, in whole units."""

    max_age_seconds: float | None = Field(None, gt=0)
    """Since the push of a unit's oldest member."""
    max_lag: int | None = Field(None, ge=0, lt=2**63)
    """Policy versions behind the published one, by a unit's lowest version."""


class ArchiveSettings(Section):
    """What stays readable after it has left, and for how long."""

    consumed: bool = True
    """What every consumer has done with."""
    dropped: bool = True
    """What was dropped, evicted, too old or too stale."""
    deleted: bool = False
    """What was deleted by Delete."""
    refused: bool = True
    """What was refused when it was pushed, as much of it as there is room for."""
    max_age_seconds: float = Field(7 * 86400.0, ge=0)
    """Since it left; 0: any."""
    max_bytes: int = Field(10 * GIBI, ge=MEBI, lt=2**63)
    """Of the files on disk; the oldest go first."""
    max_pending_bytes: int = Field(GIBI, ge=MEBI, lt=2**63)
    """Payload bytes that have left and aren't in a file yet; the oldest go without."""
    segment_seconds: float = Field(10.0, ge=0.1, le=3600)
    """What has left is in a file after so many seconds, at the latest."""

    def keeps(self, reason: str) -> bool:
        """Whether what leaves for this reason is archived."""
        if reason in ("consumed", "deleted", "refused"):
            return bool(getattr(self, reason))
        return self.dropped


class BufferSettings(Section):
    """How one buffer groups, computes, delivers, and what bounds it."""

    group_by: Literal["none", "task", "run", "step"] = "task"
    """Which key makes a group."""
    group_size: int = Field(0, ge=0, le=MAX_GROUP_SIZE)
    """Members that make a group whole; 0: stated by each push or by SealGroup."""
    group_deadline_seconds: float = Field(0.0, ge=0)
    """From a group's first member to its deadline; 0: none."""
    on_group_deadline: Literal["wait", "use_partial", "drop"] = "wait"
    """What happens to a group that isn't whole at its deadline; wait: it is counted as overdue."""
    min_group_size: int = Field(1, ge=1, le=1_000_000)
    """Fewest members with which `use_partial` uses a group; smaller ones are dropped."""
    late_members: Literal["refuse", "new_group"] = "refuse"
    """What happens to an experience whose group has closed."""
    on_bad_reward: Literal["refuse", "tombstone"] = "refuse"
    """What happens to a reward that is NaN, or missing where it is needed; tombstone: it has no vote."""
    on_missing_field: Literal["refuse", "wait"] = "refuse"
    """An experience without a field that the estimator needs is refused, or waits for Annotate."""
    consumers: tuple[ConsumerSettings, ...] = (ConsumerSettings(name="trainer"),)
    """Its readers: each gets everything."""
    advantage: AdvantageSettings = AdvantageSettings()
    lease_seconds: float = Field(600.0, gt=0, le=7 * 86400)
    """Until an unacknowledged delivery is offered again."""
    max_items: int = Field(0, ge=0, lt=2**63)
    """Most experiences stored; 0: bounded by `max_bytes` only."""
    max_bytes: int = Field(64 * GIBI, gt=0, lt=2**63)
    """Most payload bytes stored."""
    duplicate_horizon_seconds: float = Field(86400.0, ge=0)
    """For how long consumed uids and closed groups are remembered."""
    on_full: Literal["refuse", "evict", "block"] = "refuse"
    """A push that finds the buffer full is refused, or what `remover` chooses makes room, or it waits."""
    full_timeout_seconds: float = Field(10.0, gt=0, le=3600)
    """Under `on_full = "block"`: the longest wait of a push for room."""
    remover: AnySelector = SelectorSettings()
    """Which units leave first under `on_full = "evict"`; whole groups where there are groups."""
    max_pending_bytes: int = Field(0, ge=0, lt=2**63)
    """Most bytes of pushes that wait for their commit, and as many in line for room; 0: any."""
    retention: RetentionSettings | None = None
    """What leaves by its age or its policy version; None: nothing."""
    on_future_version: Literal["hold", "refuse", "deliver"] = "hold"
    """What happens to experiences of a policy version that isn't published yet."""
    on_missing_version: Literal["refuse", "deliver"] = "refuse"
    """What happens to an experience without policy version where a consumer's staleness is judged by
    versions: it is refused, and held if it was stored before; or it counts as fresh."""
    pacing: PacingSettings | None = None
    """Admission of new tasks; None: all are admitted."""
    archive: ArchiveSettings | None = None
    """What stays readable after it has left; None: nothing."""

    @field_validator("consumers", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple({"name": entry} if isinstance(entry, str) else entry for entry in value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BufferSettings:
        names = [consumer.name for consumer in self.consumers]
        if not names:
            raise ValueError("consumers: at least one is needed, or nothing is ever retired")
        if len(names) > MAX_CONSUMERS:
            raise ValueError(f"consumers: {len(names)} are over the limit of {MAX_CONSUMERS}")
        if len(set(names)) != len(names):
            raise ValueError(f"consumers: names must differ, got {names}")
        if self.pacing is not None and self.pacing.consumer not in names:
            raise ValueError(
                f"pacing.consumer: {self.pacing.consumer!r} is none of the consumers {names}"
            )
        paced = [c for c in self.consumers if self.pacing and c.name == self.pacing.consumer]
        if any(consumer.replay and not consumer.max_times_sampled for consumer in paced):
            raise ValueError(
                "pacing.consumer replays without max_times_sampled: it never consumes anything, and "
                "no task would be admitted any more; give it max_times_sampled"
            )
        if self.group_by == "none" and any(c.unit == "group" for c in self.consumers):
            raise ValueError('consumers: unit "group" needs group_by = "task", "run" or "step"')
        if problem := self._grouping_problem():
            raise ValueError(problem)
        if self.on_group_deadline != "wait" and not self.group_deadline_seconds:
            raise ValueError(
                f'on_group_deadline = "{self.on_group_deadline}" needs group_deadline_seconds > 0'
            )
        return self

    def _grouping_problem(self) -> str:
        """Why the estimator can't work with the groups; empty when it can."""
        plan = self.advantage.plan
        if plan is None:
            return ""
        name = self.advantage.estimator
        if self.group_by == "none" and plan.scope == "group":
            return f"advantage: {name!r} with these parameters needs groups; set group_by"
        steps = getattr(plan.parameters, "turn_rewards", "none") == "steps"
        if steps and self.group_by not in ("task", "run"):
            return 'advantage: turn_rewards = "steps" needs group_by = "task" or "run"'
        if plan.spec.runs_in_task and self.group_by != "task":
            return f'advantage: {name!r} compares the runs of a task; set group_by = "task"'
        return ""

    def group_size_problem(self, size: int) -> str:
        """Why no group can have so many members; empty when one can."""
        if size > MAX_GROUP_SIZE:
            return f"group_size {size} is over the limit of {MAX_GROUP_SIZE}"
        # Where nobody waits for whole groups, members can leave before the others come.
        if self.max_items and size > self.max_items and self.waits_for_groups:
            return (
                f"group_size = {size} is over max_items = {self.max_items}: no group could ever be "
                "whole; raise max_items, or state a smaller size"
            )
        return ""

    def impossible(self) -> str:
        """Why no group could ever be whole, or a consumer never get anything; empty if nothing is.

        What is stored stays readable: whoever sets or changes settings asks, not who restores them.
        """
        size, most = self.group_size, self.max_items
        if self.max_bytes < MIN_PAYLOAD_BYTES:
            return (
                f"max_bytes = {self.max_bytes} has no room for any experience: the smallest takes "
                f"{MIN_PAYLOAD_BYTES}"
            )
        if problem := self.group_size_problem(size):
            return problem
        if size * MIN_PAYLOAD_BYTES > self.max_bytes and self.waits_for_groups:
            return (
                f"group_size = {size} is too large for max_bytes = {self.max_bytes}: no group could "
                "ever be whole; raise max_bytes, or lower group_size"
            )
        least = self.min_group_size if self.on_group_deadline == "use_partial" else 0
        if least > (size or most or least):
            name = "group_size" if size else "max_items"
            return (
                f"min_group_size = {least} is over {name} = {size or most}: no group could ever be "
                "used at its deadline; lower min_group_size"
            )
        for consumer in self.consumers:
            if most and (problem := self._starved(consumer, most)):
                return f"consumers: {consumer.name!r}: {problem}; raise max_items, or lower it"
        return ""

    def _starved(self, consumer: ConsumerSettings, most: int) -> str:
        """Why a consumer's limiter would never let it sample, with so many experiences at most."""
        if (limiter := consumer.limiter) is None:
            return ""
        per_unit = max(self.group_size, 1) if consumer.unit == "group" else 1
        units = "items" if per_unit == 1 else f"groups of {per_unit}"
        if limiter.min_size * per_unit > most:
            return (
                f"limiter.min_size = {limiter.min_size} {units} never fit into max_items = {most}"
            )
        if limiter.plan.first_sample() > most // per_unit:
            return (
                f"limiter.min_diff = {limiter.min_diff:g} lets nothing be sampled before "
                f"{limiter.plan.first_sample()} {units} are stored, over max_items = {most}"
            )
        return ""

    @cached_property
    def version_window(self) -> str:
        """What can't be judged of an experience without policy version, in words.

        Empty: nothing, or such an experience counts as fresh.
        """
        if self.on_missing_version == "deliver":
            return ""
        for consumer in self.consumers:
            if consumer.staleness is not None and consumer.staleness.window:
                return f"the staleness of consumer {consumer.name!r} ({consumer.staleness.window})"
        return ""

    @property
    def needs_groups(self) -> bool:
        """True when the members of a group are computed together."""
        plan = self.advantage.plan
        return plan is not None and plan.scope == "group"

    @property
    def waits_for_groups(self) -> bool:
        """True when somebody gets nothing of a group before it is whole."""
        return self.needs_groups or any(consumer.unit == "group" for consumer in self.consumers)
