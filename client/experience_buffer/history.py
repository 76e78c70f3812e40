"""What has happened in a buffer: trends, training steps, departures, and one experience's way.

Values only. A server keeps these in memory, and bounded: they begin anew when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experience_buffer import _show
from experience_buffer._show import Shown

__all__ = [
    "Acknowledgement",
    "ConsumerTrend",
    "Departure",
    "DepartureCount",
    "Departures",
    "Distribution",
    "HistoryEvent",
    "LaterFinding",
    "StepInfo",
    "TrendPoint",
    "Trends",
]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Distribution(Shown):
    """How values are spread: counts between limits, and what sums them up.

    Attributes:
        limits: Limits of the bins, ascending and equally far apart; one more than counts, none where
            there are no values. What lies on a limit is in the bin that begins there.
        counts: Values in each bin; their sum is the number of values.
        mean: Of all values; None where there are none.
        std: Their standard deviation (divided by their number); None where there are none.
        min: The smallest; None where there are none.
        max: The largest; None where there are none.
    """

    limits: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None

    def __repr__(self) -> str:
        if not self.counts:
            return "<Distribution of no values>"
        values = _show.counted(sum(self.counts), "value")
        return (
            f"<Distribution of {values}: mean {_number(self.mean)}, "
            f"{_number(self.min)} to {_number(self.max)}>"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConsumerTrend(Shown):
    """What one consumer did in one interval.

    Attributes:
        name: The consumer's name.
        num_ready_units: Units that could be sampled at its end.
        num_leased_units: Units that were on lease at its end.
        num_waiting: Sample calls and streams that waited at its end.
        num_delivered: Experiences delivered in it, repeats counted.
        num_acked: Experiences acknowledged in it.
    """

    name: str
    num_ready_units: int
    num_leased_units: int
    num_waiting: int
    num_delivered: int
    num_acked: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrendPoint(Shown):
    """What happened in a buffer in one interval, and what it held at its end.

    Means are over what came, or was delivered, in it; None where nothing was.

    Attributes:
        time: When it ended, seconds since the Unix epoch.
        seconds: How long it was: a rate is a number divided by it.
        num_pushed: Experiences stored in it.
        num_pushed_bytes: Their payload bytes.
        num_trained: Experiences acknowledged in it, by consumers that aren't raw.
        num_delivered: Experiences delivered in it, to consumers that aren't raw.
        num_unused: Experiences that left in it without having been trained on.
        num_items: Experiences stored at its end.
        num_bytes: Their payload bytes.
        num_open_groups: Open groups at its end.
        num_ready_units: Units ready at its end, of the consumer that isn't raw and has the fewest.
        mean_reward: Mean of the rewards that came, pushed or annotated.
        solve_ratio: Of these rewards, the part that is above 0.
        mean_response_tokens: Mean response length of what was pushed, in tokens.
        mean_staleness: Mean policy versions behind of what was delivered.
        max_staleness: The most.
        mean_seconds_in_buffer: Mean seconds from push to delivery of what was delivered.
        num_groups: Groups that became whole in it, of which at least two members have a reward.
        num_zero_variance_groups: Of these, those all of whose members had the same reward.
        consumers: In the order of the configuration.
    """

    time: float
    seconds: float
    num_pushed: int
    num_pushed_bytes: int
    num_trained: int
    num_delivered: int
    num_unused: int
    num_items: int
    num_bytes: int
    num_open_groups: int
    num_ready_units: int
    mean_reward: float | None
    solve_ratio: float | None
    mean_response_tokens: float | None
    mean_staleness: float | None
    max_staleness: int | None
    mean_seconds_in_buffer: float | None
    num_groups: int
    num_zero_variance_groups: int
    consumers: tuple[ConsumerTrend, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trends(Shown):
    """The last minutes of a buffer.

    Attributes:
        buffer: The buffer's name.
        begin_time: Since when it is watched: the start of the server, or the buffer's creation;
            seconds since the Unix epoch.
        interval_seconds: Seconds between two points.
        points: Oldest first.
        rewards: Rewards that came in this time, pushed or annotated; as all that follows, of whole
            minutes that cover it.
        advantages: Advantages of what was computed in this time, a mean per experience.
        response_tokens: Response lengths of what was pushed in this time, in tokens.
        staleness: Policy versions behind of what was delivered in this time.
        seconds_in_buffer: Seconds from push to delivery of what was delivered in this time.
    """

    buffer: str
    begin_time: float
    interval_seconds: float
    points: tuple[TrendPoint, ...]
    rewards: Distribution
    advantages: Distribution
    response_tokens: Distribution
    staleness: Distribution
    seconds_in_buffer: Distribution

    def __repr__(self) -> str:
        seconds = sum(point.seconds for point in self.points)
        pushed = sum(point.num_pushed for point in self.points)
        trained = sum(point.num_trained for point in self.points)
        return _show.line(
            f"<Trends of {self.buffer!r}: {_show.duration(seconds)}, {pushed:,} pushed, "
            f"{trained:,} trained>"
        )

    def _repr_html_(self) -> str:
        return _show.html_lines([repr(self)]) + _show.html_of_values(self.points, most_rows=180)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepInfo(Shown):
    """What one training step of one consumer has consumed.

    Attributes:
        consumer: The consumer.
        step: The training step.
        num_experiences: Experiences acknowledged with it, each as often as it was.
        num_groups: Groups acknowledged with it; 0 where there are no groups.
        num_leases: Leases acknowledged with it: delivered batches.
        response_tokens: Their response tokens.
        first_ack_time: When its first acknowledgement came, seconds since the Unix epoch; None: before
            the server started.
        last_ack_time: When its last acknowledgement came, as `first_ack_time`.
        mean_staleness: Mean policy versions behind when they were delivered; None where unknown.
        max_staleness: The most.
        rewards: Their rewards.
        advantages: Their advantages, a mean per experience; of those that were computed since the
            server started.
        num_compared_groups: Groups of which it had at least two rewards: zero variance can be told of
            these alone.
        num_zero_variance_groups: Of these, those all of whose rewards are the same: they teach
            nothing.
        groups: Keys of its groups, the first 32 of them.
        is_retained: A rewind would make it available again.
        is_partial: Some of it was acknowledged before the server started: of that only what is kept
            for a rewind is known.
    """

    consumer: str
    step: int
    num_experiences: int
    num_groups: int
    num_leases: int
    response_tokens: int
    first_ack_time: float | None
    last_ack_time: float | None
    mean_staleness: float | None
    max_staleness: int | None
    rewards: Distribution
    advantages: Distribution
    num_compared_groups: int
    num_zero_variance_groups: int
    groups: tuple[str, ...]
    is_retained: bool
    is_partial: bool

    def __repr__(self) -> str:
        said = _show.counted(self.num_experiences, "experience")
        if self.rewards.mean is not None:
            said += f", reward {_number(self.rewards.mean)}"
        if self.mean_staleness is not None:
            said += f", {_number(self.mean_staleness)} versions behind"
        return _show.line(f"<StepInfo {self.consumer!r} step {self.step}: {said}>")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Acknowledgement(Shown):
    """An acknowledgement of an experience.

    Attributes:
        consumer: The consumer.
        step: The training step; None where none was given.
        time: When, seconds since the Unix epoch; None: before the server started.
    """

    consumer: str
    step: int | None
    time: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Departure(Shown):
    """How an experience left.

    Attributes:
        uid: Its name.
        group: Its group's key; empty where there are none.
        reason: Why it left: "consumed" (every consumer has acknowledged it), "deleted",
            "group_dropped", "zero_variance" (its group's rewards are all equal, and such groups are
            withheld), "missing_field" (not annotated in time), "stale" (a consumer found it too stale),
            "evicted" (its room was needed), "damaged" (it can't be read back), "aged" or "outdated"
            (see `Retention`).
        message: More about it, in words: the reason that was given, the limit that was met.
        time: When, seconds since the Unix epoch.
        reward: Reward as pushed; None when it has none.
        is_trained: A consumer that isn't raw had acknowledged it.
        acked_by: Who had acknowledged it, the first one first.
        is_archived: The archive has it.
    """

    uid: str
    group: str
    reason: str
    message: str
    time: float
    reward: float | None
    is_trained: bool
    acked_by: tuple[Acknowledgement, ...]
    is_archived: bool

    def __repr__(self) -> str:
        words = f": {self.message}" if self.message else ""
        return _show.line(f"<Departure {self.uid!r}, {self.reason}{words}>")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DepartureCount(Shown):
    """How many left for one reason.

    Attributes:
        reason: The reason, one of those of `Departure`.
        total: Since `Departures.begin_time`.
        recent: In each of `Departures.window_times`.
    """

    reason: str
    total: int
    recent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Departures(Shown):
    """What left a buffer lately, and why.

    Attributes:
        departures: The newest first; the server remembers the last 1,000 of each reason.
        counts: By reason, most first.
        begin_time: Since when they are counted: the start of the server, or the buffer's creation;
            seconds since the Unix epoch.
        window_seconds: How long each window of `DepartureCount.recent` is.
        window_times: When each window began, oldest first, seconds since the Unix epoch; the last
            one isn't over.
    """

    departures: tuple[Departure, ...]
    counts: tuple[DepartureCount, ...]
    begin_time: float
    window_seconds: float
    window_times: tuple[float, ...]

    def __repr__(self) -> str:
        said = ", ".join(f"{each.total:,} {each.reason}" for each in self.counts)
        return _show.line(f"<Departures: {said or 'none'}>")

    def __str__(self) -> str:
        rows = [
            (each.uid, each.reason, each.message, each.reward, each.is_trained)
            for each in self.departures
        ]
        header = ("uid", "reason", "message", "reward", "trained")
        return "\n\n".join([repr(self), _show.table(header, rows)] if rows else [repr(self)])

    def _repr_html_(self) -> str:
        return _show.html_lines([repr(self)]) + _show.html_of_values(self.departures)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HistoryEvent(Shown):
    """Something that happened to an experience.

    Attributes:
        kind: What: "pushed", "completed" (its group became whole), "computed", "annotated", "leased",
            "returned", "acknowledged", "passed_over", "quarantined", "departed".
        time: When, seconds since the Unix epoch; None where unknown.
        consumer: The consumer that it concerns; empty for none.
        who: Who did it: the holder or caller as it was named; empty where unknown.
        step: The training step; None where there is none.
        lease_id: The lease; 0: none.
        until_time: When the lease expires, seconds since the Unix epoch; None for what is no lease.
        message: More about it, in words.
    """

    kind: str
    time: float | None = None
    consumer: str = ""
    who: str = ""
    step: int | None = None
    lease_id: int = 0
    until_time: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LaterFinding(Shown):
    """What `annotate` has added to an experience after it had left.

    Attributes:
        time: When, seconds since the Unix epoch.
        reward: A reward; None where none was given.
        info: Entries of `info`. All numbers are floats.
        tensors: A safetensors file; empty where none were given.
    """

    time: float
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    tensors: bytes = field(default=b"", repr=False)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
