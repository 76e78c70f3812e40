"""What looking at a buffer shows: its groups with their members, and its open leases. Values only.

Single experiences are in `values.py`, statistics in `stats.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

from experience_buffer import _show
from experience_buffer._show import Shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from experience_buffer.consumer_options import Unit
    from experience_buffer.options import DeadlinePolicy

__all__ = [
    "ConsumerPlace",
    "ExperienceState",
    "GroupInfo",
    "GroupMember",
    "GroupOrder",
    "GroupState",
    "LeaseInfo",
    "LeasePart",
    "LeasedUnit",
    "Range",
    "Where",
]
__dir__ = __all__.copy

ExperienceState: TypeAlias = Literal[
    "waiting_for_group",
    "computing",
    "ready",
    "leased",
    "quarantined",
    "tombstone",
    "waiting_for_fields",
    "held",
    "retained",
    "consumed",
]
"""Where an experience is on its way. "leased": at least one consumer holds a lease on it, whatever it is
for the others; "ready": none does, and at least one can sample it; "waiting_for_fields": it or its group
lacks what the estimator needs; "held": its policy version isn't published yet, or isn't known where a
window needs it; "retained": every consumer has consumed it, and it is kept because a step may be rewound;
"consumed": every consumer has, or has passed it over, and it is about to leave."""
GroupState: TypeAlias = Literal[
    "open",
    "waiting_for_fields",
    "computing",
    "ready",
    "leased",
    "held",
    "quarantined",
    "retained",
    "consumed",
    "dropped",
]
"""Where a group is on its way. "open": members are missing, or not on disk yet; "quarantined": it can't be
computed or read, or came back too often; "dropped": and somebody still holds some of it. The others are as
of experiences."""
GroupOrder: TypeAlias = Literal["stuck", "oldest", "newest", "key"]
"""In which order groups come. "stuck": those that can't be delivered first."""

Range: TypeAlias = "tuple[float | None, float | None]"
"""Lowest and highest of what is looked for, both included; None: without an end there."""


class Where(TypedDict, total=False):
    """Which experiences: all that is given has to hold. What isn't known of one doesn't match.

    Attributes:
        tid: Those of this task.
        rid: Those of this run.
        sid: Those of this step.
        state: Those in this state: that of their `ExperienceSummary`, or, with `consumer`, where they
            are for that consumer.
        consumer: For which consumer `state` and `step` hold.
        step: Those that were acknowledged with this training step and can still be rewound, by
            `consumer` or by any.
        reward: Those with a reward between (lowest, highest).
        response_tokens: Those with a response of so many tokens, (fewest, most).
        policy_version: Those of which all tokens are of policy versions between (lowest, highest).
        staleness: Those so many policy versions behind the published one, (fewest, most).
        push_time: Those accepted between (earliest, latest), seconds since the Unix epoch.
        truncated: Those whose response was cut off, or wasn't.
        flags: Those whose computation says all of these: "singleton", "zero_variance", "zero_mask",
            "bootstrapped", "masked".
        uid_prefix: Those whose uid begins so.
        text: Those whose uid holds this text.
        departure_reason: With `archived`: those that have left for this reason; see `Departure`.
        departure_time: With `archived`: those that have left between (earliest, latest), seconds since
            the Unix epoch.
    """

    tid: str
    rid: str
    sid: str
    state: ExperienceState | None
    consumer: str
    step: int | None
    reward: Range | None
    response_tokens: Range | None
    policy_version: Range | None
    staleness: Range | None
    push_time: Range | None
    truncated: bool | None
    flags: str | Sequence[str]
    uid_prefix: str
    text: str
    departure_reason: str
    departure_time: Range | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConsumerPlace(Shown):
    """Where an experience or a group is for one consumer.

    Attributes:
        consumer: The consumer's name.
        state: Where it is on its way to this consumer: "waiting_for_group", "waiting_for_fields",
            "computing", "held", "ready", "leased" (by this consumer), "quarantined", "retained" (this
            consumer has consumed it, and may be rewound to before that), "consumed" (it won't get it
            any more), or "tombstone".
        lease_id: The lease that holds it; 0: none does.
        step: The last training step that acknowledged it and can still be rewound; None where there
            is none.
        num_deliveries: Deliveries to this consumer since it last acknowledged it, an open one
            included.
        message: Why it is there, where it is held, quarantined or passed over.
    """

    consumer: str
    state: ExperienceState
    lease_id: int = 0
    step: int | None = None
    num_deliveries: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupMember(Shown):
    """One member of a group: an experience, or a failed rollout.

    Attributes:
        uid: Its name.
        run: Its run within the task.
        step: Its step within the run.
        state: Where it is on its way: "waiting_for_group", "waiting_for_fields", "computing", "held",
            "ready", "leased", "retained", "consumed", "quarantined", or "tombstone".
        reward: Its scalar reward; None where it has none.
        response_tokens: Tokens of its response.
        payload_bytes: Size of its payload in bytes; 0 of a tombstone.
        min_policy_version: Lowest policy version that produced a token; None when unknown.
        max_policy_version: Highest policy version that produced a token; None when unknown.
        push_time: When it was accepted, seconds since the Unix epoch.
        magnitude: Mean of |advantage| over its response tokens; None where none were computed.
        advantage: Mean of its advantages over the tokens that train; None where none were computed,
            where no token trains, and in `list_groups`.
        min_advantage: Least advantage of a token that trains; None where `advantage` is.
        max_advantage: Greatest advantage of a token that trains; None where `advantage` is.
        num_trained_tokens: Response tokens that train: masked neither by the worker nor because its
            group has no variance. None where no advantages were computed, and in `list_groups`.
        per_token: Whether its advantages differ from token to token; None where none were computed,
            and in `list_groups`.
        flags: What the computation says of it: "singleton", "zero_variance", "zero_mask",
            "bootstrapped", "masked"; empty in `list_groups`.
        message: Why it is where it is: the reason of a failed rollout, of a quarantine, what is
            missing.
        places: Where it is for each consumer; empty in `list_groups`, and of a tombstone.
    """

    uid: str
    run: int
    step: int
    state: ExperienceState
    reward: float | None
    response_tokens: int
    payload_bytes: int
    min_policy_version: int | None
    max_policy_version: int | None
    push_time: float
    magnitude: float | None = None
    advantage: float | None = None
    min_advantage: float | None = None
    max_advantage: float | None = None
    num_trained_tokens: int | None = None
    per_token: bool | None = None
    flags: tuple[str, ...] = ()
    message: str = ""
    places: tuple[ConsumerPlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupInfo(Shown):
    """One group: which members it has, and why it isn't delivered.

    Attributes:
        group: Its key: a tid, rid or sid, by the buffer's grouping.
        state: Where it is on its way: "open" (members are missing, or not on disk yet),
            "waiting_for_fields", "computing", "held", "ready", "leased" (a consumer holds it, or a
            member), "quarantined" (it can't be computed or read, or came back too often), "retained"
            (every consumer has consumed it, and may be rewound), "consumed", or "dropped" (somebody
            still holds some of it).
        waits_for: Why it isn't delivered, in words; empty where nothing keeps it.
        num_members: Members that have come, tombstones included, also those that were consumed
            before it was whole.
        num_tombstones: Failed rollouts among its members.
        group_size: Members that make it whole; 0 while that isn't known.
        num_missing: Members that are to come; None where its size isn't known.
        missing_runs: Which runs these are, where the runs that are there tell; at most 256.
        closed: Why it takes no more members: "whole", "sealed", "deadline" or "dropped"; empty while
            it is open.
        create_time: When its first member was accepted, seconds since the Unix epoch.
        close_time: When its last member was accepted, where it is whole; None where that is unknown.
        age_seconds: Since its first member was accepted.
        deadline_time: When it meets its deadline, seconds since the Unix epoch; None where it has none.
        on_deadline: What happens then: "wait", "use_partial" or "drop"; None where it has none.
        is_overdue: Whether the deadline has passed, and it waits on.
        num_bytes: Payload bytes of its members.
        mean_reward: Of the members that have a reward; None where none has.
        min_policy_version: Lowest policy version that produced a token; None when unknown.
        max_policy_version: Highest policy version that produced a token; None when unknown.
        staleness: Published policy version minus its lowest; None when either is unknown.
        places: Where it is for each consumer.
        members: By run and step; at most 256.
        computation: How its advantages were computed: estimator, parameters, members, votes, mean and
            std used, by name; None in `list_groups`, and where none were.
    """

    group: str
    state: GroupState
    waits_for: str
    num_members: int
    num_tombstones: int
    group_size: int
    num_missing: int | None
    missing_runs: tuple[int, ...]
    closed: str
    create_time: float
    close_time: float | None
    age_seconds: float
    deadline_time: float | None
    on_deadline: DeadlinePolicy | None = None
    is_overdue: bool
    num_bytes: int
    mean_reward: float | None
    min_policy_version: int | None
    max_policy_version: int | None
    staleness: int | None
    places: tuple[ConsumerPlace, ...]
    members: tuple[GroupMember, ...]
    computation: dict[str, Any] | None = None

    def __repr__(self) -> str:
        size = f"{self.num_members} of {self.group_size or 'unknown'}"
        why = f"; {self.waits_for}" if self.waits_for else ""
        return _show.line(f"<GroupInfo {self.group!r}: {self.state}, {size}{why}>")

    def __str__(self) -> str:
        return f"{self!r}\n\n{_show.table(_MEMBER_HEADER, _member_rows(self.members))}"

    def _repr_html_(self) -> str:
        shown = _show.html_table(_MEMBER_HEADER, _member_rows(self.members))
        return _show.html_lines([repr(self)]) + shown


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LeasedUnit(Shown):
    """One unit of a lease.

    Attributes:
        key: The group's key, or the experience's uid where units are items.
        num_experiences: Experiences in it.
        num_deliveries: Deliveries to this consumer since it last acknowledged it, this one included.
        rank: The rank whose part it is in; 0 where the lease isn't shared.
        is_stale: Whether it was delivered although it is too stale, as the consumer asks for.
        is_gone: Whether it was dropped meanwhile: it leaves with the lease.
    """

    key: str
    num_experiences: int
    num_deliveries: int
    rank: int
    is_stale: bool
    is_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LeasePart(Shown):
    """The part of a shared lease that is one rank's.

    Attributes:
        rank: The rank.
        num_units: Units in its part.
        holder: Who has received it last, as the client named itself; empty where it didn't, or nobody
            has since the server started.
        address: The network address of that; empty where unknown.
        caller: The name of its token or certificate; empty where there is no access control.
        receive_time: When it was received last, seconds since the Unix epoch; None where it wasn't
            since the server started.
        is_acked: Whether it was acknowledged.
        step: The training step of that; None where there is none.
    """

    rank: int
    num_units: int
    holder: str
    address: str
    caller: str
    receive_time: float | None
    is_acked: bool
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LeaseInfo(Shown):
    """One open lease: who holds what, since when, until when.

    Attributes:
        id: Names the lease in `nack` and `ack`; unique within its buffer.
        consumer: The consumer's name.
        unit: What its units are: "item" or "group".
        holder: Who asked for it, as the client named itself: "host:pid" unless it says otherwise; empty
            where it didn't, or before the server started.
        address: The network address of that; empty where unknown.
        caller: The name of its token or certificate; empty where there is no access control.
        on_stream: Whether it was delivered on a stream, whose end gives it back.
        grant_time: When it was granted, seconds since the Unix epoch; None where that was before the
            server started.
        age_seconds: Since then; None where `grant_time` is.
        expire_time: When it expires and its experiences are offered again, seconds since the Unix epoch.
        expires_in_seconds: Until then.
        is_ending: Whether its acknowledgement is on its way to the disk.
        num_units: Its units.
        num_experiences: Experiences in them.
        num_bytes: Their payload bytes.
        max_deliveries: How often the unit that was delivered most often was, since it was last
            acknowledged, this delivery included.
        world_size: Ranks that share it; 0: it isn't shared.
        parts: What of it is whose, by rank; empty where it isn't shared.
        units: Its units, the first 32 of them; the first 1,024 where the lease was asked for by its id.
    """

    id: int
    consumer: str
    unit: Unit
    holder: str
    address: str
    caller: str
    on_stream: bool
    grant_time: float | None
    age_seconds: float | None
    expire_time: float
    expires_in_seconds: float
    is_ending: bool
    num_units: int
    num_experiences: int
    num_bytes: int
    max_deliveries: int
    world_size: int
    parts: tuple[LeasePart, ...]
    units: tuple[LeasedUnit, ...]

    @property
    def held_by(self) -> str:
        """Who holds it, in words: by name, address, and caller where these say more."""
        known = dict.fromkeys(filter(None, (self.holder, self.address, self.caller)))
        return ", ".join(known) or "unknown: granted before the server started"

    def __repr__(self) -> str:
        units = _show.counted(self.num_units, self.unit)
        age = "" if self.age_seconds is None else f" since {_show.duration(self.age_seconds)}"
        left = f"expires in {_show.duration(self.expires_in_seconds)}"
        held = f"held by {self.held_by}{age}, {left}"
        return _show.line(f"<LeaseInfo {self.id} of {self.consumer!r}: {units} {held}>")


_MEMBER_HEADER: Final = (
    *("run", "step", "state", "reward", "advantage", "tokens", "version", "flags", "message"),
)


def _member_rows(members: Sequence[GroupMember]) -> list[_show.Cells]:
    return [
        (
            *(each.run, each.step, each.state, each.reward, each.advantage, each.response_tokens),
            *(each.min_policy_version, " ".join(each.flags), each.message),
        )
        for each in members
    ]
