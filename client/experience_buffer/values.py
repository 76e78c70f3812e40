"""What calls return: summaries and statistics.

Values only; batches are in `_sync/batch.py`, what became of pushes and annotations is in `outcomes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from experience_buffer.consumer_options import Unit
    from experience_buffer.eid import EID
    from experience_buffer.experience import Experience
    from experience_buffer.options import BufferConfig

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
]
"""Where an experience is on its way. "waiting_for_fields": it or its group lacks what the estimator
needs; "held": its policy version isn't published yet; "retained": every consumer has consumed it,
and it is kept because a step may be rewound."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A failed rollout: it completes its group and has no vote in the group's statistics."""

    eid: EID
    """The identity that the experience would have had."""
    reason: str = ""
    """Why the rollout failed; at most 1,024 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterCounts:
    """What became of the experiences that a writer took."""

    num_appended: int
    num_stored: int
    num_duplicates: int
    """Stored already, with the same content."""
    num_refused: int
    num_failed: int
    """In requests that failed as a whole."""

    @property
    def num_pending(self) -> int:
        """Experiences that have no outcome yet."""
        settled = self.num_stored + self.num_duplicates + self.num_refused + self.num_failed
        return self.num_appended - settled


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceSummary:
    """What is known of a stored experience without its payload."""

    uid: str
    tid: str
    """Task key, "batch/task"."""
    rid: str
    """Run key, "batch/task/run"."""
    sid: str
    """Step key, "batch/task/step"."""
    state: ExperienceState
    reward: float | None
    response_tokens: int
    payload_bytes: int
    min_policy_version: int | None
    """Lowest policy version that produced a token; None when unknown."""
    max_policy_version: int | None
    """Highest policy version that produced a token; None when unknown."""
    push_time: float
    """When it was accepted, seconds since the Unix epoch."""
    message: str
    """Why it is where it is: for tombstones, quarantined ones and those that wait for fields."""
    priority: float
    """As set by `update_priorities` or pushed in `info["priority"]`; 1 where neither was."""
    generation: int
    """Changes with every update of the priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperience:
    """One experience as the server holds it."""

    summary: ExperienceSummary
    payload: bytes = field(repr=False)
    """Its TRXP payload, computed advantages in place; empty for a tombstone."""
    computation: dict[str, Any] | None = None
    """How its advantages were computed: estimator, parameters, group size, statistics used, by
    name; None where none were. All numbers are floats."""

    @property
    def experience(self) -> Experience | None:
        """The decoded experience, None for a tombstone; needs torch.

        Raises:
            TrxpError: The payload is damaged.
        """
        from experience_buffer import trxp

        return trxp.decode(self.payload)[0] if self.payload else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResult:
    """What `delete` removed and what it left."""

    num_deleted: int
    leased_uids: tuple[str, ...]
    """Not removed: a consumer holds a lease on them."""
    unknown_uids: tuple[str, ...]
    """Not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindResult:
    """What a rewind made available again."""

    num_experiences: int
    """Whose acknowledgements were undone."""
    num_leases: int
    """Open leases that were returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeResult:
    """What was kept for a rewind and no longer is."""

    num_experiences: int
    """Acknowledged deliveries that can't be rewound any more."""
    safe_step: int | None
    """The step before which the consumer can't be rewound now; None while there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityResult:
    """What became of new priorities. Those in neither list are set."""

    num_updated: int
    unknown_uids: tuple[str, ...]
    """Not stored (any more)."""
    outdated_uids: tuple[str, ...]
    """Updated by someone else since the generation given, or pushed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Which tasks may begin."""

    granted: tuple[str, ...]
    """Those of the groups that may, in the order asked for."""
    reason: str
    """Why there are fewer than asked for; empty when there aren't."""
    retry_delay_seconds: float
    """When to ask for the others; 0 when all may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedGroup:
    """A group that gets no more members than stated."""

    num_members: int
    """Members present, tombstones included."""
    group_size: int
    """Members that make it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInfo:
    """A buffer as the server holds it."""

    config: BufferConfig
    """Every field set."""
    policy_version: int | None
    """The newest published policy version; None before the first."""
    create_time: float
    """Seconds since the Unix epoch."""
    num_items: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStats:
    """The state of one consumer."""

    name: str
    unit: Unit
    num_ready_units: int
    """Units that can be sampled now."""
    num_leased_units: int
    num_leases: int
    """Leases that are open."""
    num_waiting: int
    """Calls and streams that wait for a batch."""
    waiting_for: str
    """What the longest-waiting one waits for; empty when none waits."""
    num_acked_units: int
    """Since the server started."""
    num_redelivered_units: int
    """Offered again after an expiry or nack since the server started."""
    num_quarantined_units: int
    """Came back without an ack too often and aren't offered; see `release_quarantined`."""
    num_held_units: int
    """Of policy versions that aren't published yet."""
    num_stale_units: int
    """Left out because they were too stale, since the server started."""
    num_retained_experiences: int
    """Acknowledged deliveries of experiences that a rewind would make available again."""
    last_step: int | None
    """The highest step that was acknowledged; None before the first."""
    safe_step: int | None
    """The step before which it can't be rewound; None before the first."""
    pushes_wait_for: str
    """What keeps its limiter from accepting pushes; empty when nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """The state of one buffer."""

    name: str
    num_items: int
    """Experiences stored, tombstones not counted."""
    num_bytes: int
    """Payload bytes stored."""
    num_open_groups: int
    """Groups that aren't whole."""
    num_overdue_groups: int
    """Open groups past their deadline under the policy "wait"."""
    num_computing_groups: int
    num_quarantined_groups: int
    """Groups whose advantages can't be computed."""
    num_waiting_for_fields: int
    """Experiences that lack a field the estimator needs, and wait for `annotate`."""
    computing_waits_for: str
    """What computing waits for, in words: missing fields, a batch that isn't full; else empty."""
    num_damaged: int
    """Experiences set aside because they can't be read back from the disk."""
    num_reserved_groups: int
    """Places that workers have reserved and not pushed to yet."""
    keep_ratio: float | None
    """Of the experiences that since the server started were acknowledged for the first time, or left
    without ever having been, the part that was acknowledged; raw consumers don't count. None
    before the first."""
    num_waiting_pushes: int
    """Pushes that wait in line for room."""
    pushes_wait_for: str
    """What they wait for, in words; empty when none waits."""
    oldest_open_group: str
    """In words; empty when there is none."""
    policy_version: int | None
    consumers: tuple[ConsumerStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult:
    """A snapshot that is on disk and checked."""

    name: str
    """Its name in the server's folder of snapshots."""
    num_bytes: int
    """Size of its data."""
    num_experiences: int
    """In all buffers, tombstones not counted."""
    seconds: float
    """How long it took."""
    create_time: float
    """When it was taken, seconds since the Unix epoch."""
    removed: tuple[str, ...]
    """Older snapshots that were removed to keep the configured number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The state of a server."""

    buffers: tuple[BufferStats, ...]
    """By name."""
    server_version: str
    uptime_seconds: float
