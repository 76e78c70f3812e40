"""What calls return, but statistics, which are in `stats.py`.

Values only; batches are in `_sync/batch.py`, what became of pushes and annotations is in `outcomes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from experience_buffer import _show
from experience_buffer._show import Shown
from experience_buffer.history import Departure, HistoryEvent, LaterFinding
from experience_buffer.looking import ConsumerPlace
from experience_buffer.looking import ExperienceState as ExperienceState
from experience_buffer.stats import ArchiveStats as ArchiveStats
from experience_buffer.stats import BufferStats as BufferStats
from experience_buffer.stats import ConsumerStats as ConsumerStats
from experience_buffer.stats import DiskStats as DiskStats
from experience_buffer.stats import Stats as Stats

if TYPE_CHECKING:
    from experience_buffer.eid import EID
    from experience_buffer.experience import Experience
    from experience_buffer.options import BufferConfig

__all__ = [
    "ArchiveStats",
    "BufferInfo",
    "BufferStats",
    "ConsumerStats",
    "DeleteResult",
    "DiskStats",
    "ExperienceState",
    "ExperienceSummary",
    "PriorityResult",
    "Reservation",
    "RewindResult",
    "SafeResult",
    "SealedGroup",
    "SnapshotResult",
    "Stats",
    "StoredExperience",
    "Tombstone",
    "WriterCounts",
]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, repr=False)
class Tombstone(Shown):
    """A failed rollout: it completes its group and has no vote in the group's statistics.

    Attributes:
        eid: The identity that the experience would have had.
        reason: Why the rollout failed; at most 1,024 characters.
    """

    eid: EID
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriterCounts(Shown):
    """What became of the experiences that a writer took.

    Attributes:
        num_appended: Experiences that `append` took.
        num_stored: Durable on the server.
        num_duplicates: Stored already, with the same content.
        num_refused: Refused by the server one by one.
        num_failed: In requests that failed as a whole.
    """

    num_appended: int
    num_stored: int
    num_duplicates: int
    num_refused: int
    num_failed: int

    @property
    def num_pending(self) -> int:
        """Experiences that have no outcome yet."""
        settled = self.num_stored + self.num_duplicates + self.num_refused + self.num_failed
        return self.num_appended - settled


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExperienceSummary(Shown):
    """What is known of a stored experience without its payload.

    Attributes:
        uid: Name of the experience: all five parts of its identity.
        tid: Task key, "batch/task".
        rid: Run key, "batch/task/run".
        sid: Key of the step of a run, "batch/task/step".
        state: Where it is on its way: "waiting_for_group", "waiting_for_fields" (it or its group
            lacks what the estimator needs), "computing" (its advantages), "held" (its policy
            version isn't published yet, or isn't known where a window needs it), "ready" (at least
            one consumer can sample it, and none holds it), "leased" (at least one consumer holds it,
            whatever it is for the others), "retained" (every consumer has consumed it, and it is kept
            because a training step may be rewound), "consumed" (it is about to leave), "archived" (it
            has left), "quarantined", or "tombstone". `places` has it for each consumer.
        reward: Its scalar reward; None where it has none.
        response_tokens: Tokens of its response.
        payload_bytes: Size of its payload; 0 of a tombstone.
        min_policy_version: Lowest policy version that produced a token; None when unknown.
        max_policy_version: Highest policy version that produced a token; None when unknown.
        push_time: When it was accepted, seconds since the Unix epoch.
        message: Why it is where it is: for tombstones, quarantined ones and those that wait for
            fields.
        priority: As set by `update_priorities` or pushed in `info["priority"]`; 1 where neither
            was.
        generation: Changes with every update of the priority.
        group: The key of its group; empty in ungrouped buffers.
        staleness: Published policy version minus its lowest; None when either is unknown.
        magnitude: Mean of |advantage| over its response tokens; None where none were computed.
        truncated: Whether its response was cut off; None where that is unknown.
        places: Where it is for each consumer, in the order of the configuration; empty for a tombstone.
        departure_reason: Of what is archived, why it has left, as in `Departure`; else empty.
        departure_time: Of what is archived, when it has left, seconds since the Unix epoch.
    """

    uid: str
    tid: str
    rid: str
    sid: str
    state: ExperienceState | Literal["archived"]
    reward: float | None
    response_tokens: int
    payload_bytes: int
    min_policy_version: int | None
    max_policy_version: int | None
    push_time: float
    message: str
    priority: float
    generation: int
    group: str = ""
    staleness: int | None = None
    magnitude: float | None = None
    truncated: bool | None = None
    places: tuple[ConsumerPlace, ...] = ()
    departure_reason: str = ""
    departure_time: float | None = None

    def __repr__(self) -> str:
        said: list[str] = [self.state]
        if self.reward is not None:
            said.append(f"reward {self.reward:g}")
        said += [
            _show.counted(self.response_tokens, "response token"),
            _show.size(self.payload_bytes),
        ]
        if self.min_policy_version is not None:
            low, high = self.min_policy_version, self.max_policy_version
            said.append(f"version {low}" if low == high else f"versions {low} to {high}")
        if self.message:
            said.append(self.message)
        return _show.line(f"<ExperienceSummary {self.uid!r}: {', '.join(said)}>")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoredExperience(Shown):
    """One experience as the server holds it.

    Attributes:
        summary: What `list` says of it.
        payload: Its TRXP payload, computed advantages in place; empty for a tombstone.
        computation: How its advantages were computed: estimator, parameters, group size, statistics
            used, by name; None where none were. All numbers are floats.
        history: What is known of its past, oldest first; who and when as far as the server remembers.
        departure: How it has left, where it comes from the archive; None where it is stored.
        later: What `annotate` has added after it had left, oldest first. Tensors that it was pushed
            without are in `payload`, too; what was pushed stays as it was.
    """

    summary: ExperienceSummary
    payload: bytes = field(repr=False)
    computation: dict[str, Any] | None = None
    history: tuple[HistoryEvent, ...] = ()
    departure: Departure | None = None
    later: tuple[LaterFinding, ...] = ()

    @property
    def experience(self) -> Experience | None:
        """The decoded experience, None for a tombstone.

        Raises:
            TrxpError: The payload is damaged.
        """
        from experience_buffer import trxp

        return trxp.decode(self.payload)[0] if self.payload else None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DeleteResult(Shown):
    """What `delete` removed and what it left.

    Attributes:
        num_deleted: Experiences that were removed.
        leased_uids: Not removed: a consumer holds a lease on them.
        unknown_uids: Not there.
    """

    num_deleted: int
    leased_uids: tuple[str, ...]
    unknown_uids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RewindResult(Shown):
    """What a rewind made available again.

    Attributes:
        num_experiences: Whose acknowledgements were undone.
        num_leases: Open leases that were returned.
    """

    num_experiences: int
    num_leases: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SafeResult(Shown):
    """What was kept for a rewind and no longer is.

    Attributes:
        num_experiences: Acknowledged deliveries that can't be rewound any more.
        safe_step: The training step before which the consumer can't be rewound now; None while there is
            none.
    """

    num_experiences: int
    safe_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PriorityResult(Shown):
    """What became of new priorities. Those in neither list are set.

    Attributes:
        num_updated: Experiences whose priority is set.
        unknown_uids: Not stored (any more).
        outdated_uids: Updated by someone else since the generation given, or pushed anew.
    """

    num_updated: int
    unknown_uids: tuple[str, ...]
    outdated_uids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reservation(Shown):
    """Which tasks may begin.

    Attributes:
        granted: Those of the groups that may, in the order asked for.
        reason: Why there are fewer than asked for; empty when there aren't.
        retry_delay_seconds: When to ask for the others; 0 when all may begin.
    """

    granted: tuple[str, ...]
    reason: str
    retry_delay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SealedGroup(Shown):
    """A group that gets no more members than stated.

    Attributes:
        num_members: Members present, tombstones included.
        group_size: Members that make it whole.
    """

    num_members: int
    group_size: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BufferInfo(Shown):
    """A buffer as the server holds it.

    Attributes:
        config: Every field set.
        policy_version: The newest published policy version; None before the first.
        create_time: Seconds since the Unix epoch.
        num_items: Experiences stored, tombstones not counted.
        num_bytes: Payload bytes stored.
    """

    config: BufferConfig
    policy_version: int | None
    create_time: float
    num_items: int
    num_bytes: int

    def __repr__(self) -> str:
        version = "none" if self.policy_version is None else self.policy_version
        held = f"{_show.counted(self.num_items, 'experience')}, {_show.size(self.num_bytes)}"
        return f"<BufferInfo {held}, policy version {version}: {self.config!r}>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SnapshotResult(Shown):
    """A snapshot that is on disk and checked.

    Attributes:
        name: Its name in the server's folder of snapshots.
        num_bytes: Size of its data.
        num_experiences: In all buffers, tombstones not counted.
        seconds: How long it took.
        create_time: When it was taken, seconds since the Unix epoch.
        removed: Older snapshots that were removed to keep the configured number.
    """

    name: str
    num_bytes: int
    num_experiences: int
    seconds: float
    create_time: float
    removed: tuple[str, ...]
