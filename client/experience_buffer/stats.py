"""The state of a server, its buffers and their consumers, and the tables that show it. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from experience_buffer import _show
from experience_buffer._show import Shown

if TYPE_CHECKING:
    from experience_buffer.consumer_options import Unit

__all__ = ["ArchiveStats", "BufferStats", "ConsumerStats", "DiskStats", "Stats"]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConsumerStats(Shown):
    """The state of one consumer.

    Attributes:
        name: The consumer's name.
        unit: What it gets as one: "item" or "group".
        num_ready_units: Units that can be sampled now.
        num_leased_units: Units that are delivered and not acknowledged yet.
        num_leases: Leases that are open.
        num_waiting: Calls and streams that wait for a batch.
        waiting_for: What the longest-waiting one waits for; where none waits, what a batch of the size
            that was asked for last would wait for. Empty where such a batch could go now.
        num_acked_units: Since the server started.
        num_redelivered_units: Offered again after an expiry or nack since the server started.
        num_quarantined_units: Came back without an ack too often and aren't offered; see
            `release_quarantined`.
        num_held_units: Of policy versions that aren't published yet, or aren't known.
        num_stale_units: Left out because they were too stale, since the server started.
        num_retained_experiences: Acknowledged deliveries of experiences that a rewind would make
            available again.
        last_step: The highest training step that was acknowledged; None before the first.
        safe_step: The training step before which it can't be rewound; None before the first.
        pushes_wait_for: What keeps its limiter from accepting pushes; empty when nothing does.
        waiting_seconds: How long the longest-waiting one has waited; None when none waits.
        wait_reason: In a word why a batch can't go: "empty", "incomplete", "computing", "held",
            "window" (what may be leased at once), "min_size", "min_diff" (its limiter); empty where it
            could.
        asked_batch_size: Units of the batch that was asked for last; 0: none was since the server
            started, and the words are about a batch of one.
        waiting_holders: Who waits, as they named themselves, else their addresses; at most 16, the
            longest-waiting first.
    """

    name: str
    unit: Unit
    num_ready_units: int
    num_leased_units: int
    num_leases: int
    num_waiting: int
    waiting_for: str
    num_acked_units: int
    num_redelivered_units: int
    num_quarantined_units: int
    num_held_units: int
    num_stale_units: int
    num_retained_experiences: int
    last_step: int | None
    safe_step: int | None
    pushes_wait_for: str
    waiting_seconds: float | None = None
    wait_reason: str = ""
    asked_batch_size: int = 0
    waiting_holders: tuple[str, ...] = ()

    def __repr__(self) -> str:
        units = _show.counted(self.num_ready_units, self.unit)
        said = f"{units} ready, {self.num_leased_units:,} leased, {self.num_acked_units:,} acked"
        waits = f"; waits: {self.waiting_for}" if self.num_waiting else ""
        return _show.line(f"<ConsumerStats {self.name!r}: {said}{waits}>")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ArchiveStats(Shown):
    """The archive of one buffer. Sizes are in bytes, times in seconds since the Unix epoch.

    Attributes:
        num_pending: Experiences that have left and aren't in a file yet: they can be read all the
            same.
        pending_bytes: Their payload bytes, which the store still holds.
        pending_since_time: When the one that waits the longest has left; None when none waits.
        num_segments: Files, as they were after the last one was written; 0 before the first since
            the server started.
        num_rows: Experiences in them.
        num_bytes: Their size on disk.
        oldest_time: When the first of what is in them has left; None when nothing is.
        num_archived: Experiences that were archived since the server started.
        num_lost: Experiences that have left since then without being archived, though they were to
            be: too much waited, or the store needed the room.
        num_refused_lost: Refused pushes since then that weren't kept: there were too many.
        trouble: Why it can't be written, or which of its files can't be read; empty where nothing is
            wrong.
    """

    num_pending: int
    pending_bytes: int
    num_segments: int
    num_rows: int
    num_bytes: int
    num_archived: int
    num_lost: int
    num_refused_lost: int
    pending_since_time: float | None = None
    oldest_time: float | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BufferStats(Shown):
    """The state of one buffer.

    Attributes:
        name: The buffer's name.
        num_items: Experiences stored, tombstones not counted.
        num_bytes: Payload bytes stored.
        num_open_groups: Groups that aren't whole.
        num_overdue_groups: Open groups past their deadline under the policy "wait".
        num_computing_groups: Whole groups whose advantages are being computed.
        num_quarantined_groups: Groups whose advantages can't be computed.
        num_waiting_for_fields: Experiences that lack a field the estimator needs, and wait for
            `annotate`.
        computing_waits_for: What computing waits for or is at work on, in words: missing fields, a
            batch that isn't full, groups that are being computed; else empty.
        num_damaged: Experiences set aside because they can't be read back from the disk.
        num_reserved_groups: Places that workers have reserved and not pushed to yet.
        keep_ratio: Of the experiences that since the server started were acknowledged for the first
            time, or left without ever having been, the part that was acknowledged; raw consumers
            don't count. None before the first.
        num_waiting_pushes: Pushes that wait in line for room.
        pushes_wait_for: What they wait for, in words; empty when none waits.
        oldest_open_group: In words; empty when there is none.
        policy_version: The newest published policy version; None before the first.
        consumers: Its readers, in the order of its configuration.
        max_items: Most experiences that it may hold; 0: no limit of its own.
        max_bytes: Most payload bytes that it may hold.
        used_ratio: What is used of the tighter of the two, 0 to 1; None from a server that doesn't say.
        full_in_seconds: Until it is full at the rate of the last minutes; None where it isn't
            growing, or would take more than a year.
        full_by: The limit that it will have reached then: "max_items" or "max_bytes".
        archive: What has left and stays readable; None where it has no archive, and nothing waits for
            it.
    """

    name: str
    num_items: int
    num_bytes: int
    num_open_groups: int
    num_overdue_groups: int
    num_computing_groups: int
    num_quarantined_groups: int
    num_waiting_for_fields: int
    computing_waits_for: str
    num_damaged: int
    num_reserved_groups: int
    keep_ratio: float | None
    num_waiting_pushes: int
    pushes_wait_for: str
    oldest_open_group: str
    policy_version: int | None
    consumers: tuple[ConsumerStats, ...]
    max_items: int = 0
    max_bytes: int = 0
    used_ratio: float | None = None
    full_in_seconds: float | None = None
    full_by: str = ""
    archive: ArchiveStats | None = None

    def __repr__(self) -> str:
        said = f"{_show.counted(self.num_items, 'experience')}, {_show.size(self.num_bytes)}"
        groups = _show.counted(self.num_open_groups, "open group")
        names = ", ".join(repr(consumer.name) for consumer in self.consumers)
        return _show.line(f"<BufferStats {self.name!r}: {said}, {groups}; consumers {names}>")

    def __str__(self) -> str:
        return _tables((self,))

    def _repr_html_(self) -> str:
        return _html((self,))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiskStats(Shown):
    """How full a server's store and its disk are. Sizes are in bytes.

    Attributes:
        place: Where the store is.
        live_bytes: What holds rows and payloads.
        file_bytes: Room that was ever in use; what isn't live in it is used again.
        map_bytes: Address space set aside; 0 where none is.
        limit_bytes: What the store may grow to: `store.max_map_bytes`.
        free_bytes: Free space on its disk; None where it is kept on none.
        used_ratio: What is in use of what it may have: of its limit, or of less where the disk has
            less. 0 to 1; None before it is known.
        growth_bytes_per_second: How fast what is live has grown over the last minutes; below 0 where
            it has shrunk, None before it is known.
        full_in_seconds: Until it is full at this rate; None where it isn't growing, or would take more
            than a year.
        full_by: What it will have reached then: "store.max_map_bytes", or "disk".
    """

    place: str
    live_bytes: int
    file_bytes: int
    map_bytes: int
    limit_bytes: int
    free_bytes: int | None
    used_ratio: float | None
    growth_bytes_per_second: float | None
    full_in_seconds: float | None
    full_by: str

    def __repr__(self) -> str:
        return _show.line(f"<DiskStats: {self}>")

    def __str__(self) -> str:
        used = "" if self.used_ratio is None else f" ({self.used_ratio:.0%})"
        said = f"store {_show.size(self.live_bytes)} of {_show.size(self.limit_bytes)}{used}"
        if self.free_bytes is not None:
            said += f", {_show.size(self.free_bytes)} free on the disk"
        if self.full_in_seconds is not None:
            said += f"; full in {_show.duration(self.full_in_seconds)} at this rate"
        return said


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stats(Shown):
    """The state of a server.

    Attributes:
        buffers: By name.
        server_version: Version of the server's package.
        uptime_seconds: Since the server started.
        disk: Its store, and when that will be full; None from a server that doesn't say.
        start_time: When the server started, seconds since the Unix epoch.
        address: Where it listens.
    """

    buffers: tuple[BufferStats, ...]
    server_version: str
    uptime_seconds: float
    disk: DiskStats | None = None
    start_time: float = 0.0
    address: str = ""

    def __repr__(self) -> str:
        num_items = sum(buffer.num_items for buffer in self.buffers)
        held = f"{_show.counted(len(self.buffers), 'buffer')}, "
        return f"<Stats of {self._of}: {held}{_show.counted(num_items, 'experience')}>"

    def __str__(self) -> str:
        disk = "" if self.disk is None else f"\n{self.disk}"
        return f"{self._of}{disk}\n\n{_tables(self.buffers)}"

    def _repr_html_(self) -> str:
        disk = [] if self.disk is None else [str(self.disk)]
        return _show.html_lines([self._of, *disk]) + _html(self.buffers)

    @property
    def _of(self) -> str:
        return f"server {self.server_version}, up {_show.duration(self.uptime_seconds)}"


_BUFFER_HEADER: Final = (
    *("buffer", "experiences", "size", "open groups", "computing", "quarantined", "policy"),
)
_CONSUMER_HEADER: Final = (
    *("buffer", "consumer", "unit", "ready", "leased", "acked", "redelivered", "step"),
)


def _buffer_rows(buffers: Sequence[BufferStats]) -> list[_show.Cells]:
    return [
        (
            *(each.name, each.num_items, _show.size(each.num_bytes), each.num_open_groups),
            *(each.num_computing_groups, each.num_quarantined_groups, each.policy_version),
        )
        for each in buffers
    ]


def _consumer_rows(buffers: Sequence[BufferStats]) -> list[_show.Cells]:
    return [
        (
            *(buffer.name, each.name, each.unit, each.num_ready_units, each.num_leased_units),
            *(each.num_acked_units, each.num_redelivered_units, each.last_step),
        )
        for buffer in buffers
        for each in buffer.consumers
    ]


def _notes(buffers: Sequence[BufferStats]) -> list[str]:
    """What is in words: what is waited for, and where."""
    found = []
    for buffer in buffers:
        said = {
            "": buffer.oldest_open_group,
            "computing waits: ": buffer.computing_waits_for,
            "pushes wait: ": buffer.pushes_wait_for,
        }
        for consumer in buffer.consumers:
            if consumer.num_waiting:
                said[f"{consumer.name} waits: "] = consumer.waiting_for
            elif buffer.num_items:  # Of an empty one nobody expects anything.
                said[f"{consumer.name} would wait: "] = consumer.waiting_for
            said[f"pushes wait for {consumer.name}: "] = consumer.pushes_wait_for
        found += [f"{buffer.name}: {what}{words}" for what, words in said.items() if words]
    return found


def _tables(buffers: Sequence[BufferStats]) -> str:
    parts = [
        _show.table(_BUFFER_HEADER, _buffer_rows(buffers)),
        _show.table(_CONSUMER_HEADER, _consumer_rows(buffers)),
        "\n".join(_notes(buffers)),
    ]
    return "\n\n".join(part for part in parts if part)


def _html(buffers: Sequence[BufferStats]) -> str:
    return (
        _show.html_table(_BUFFER_HEADER, _buffer_rows(buffers))
        + _show.html_table(_CONSUMER_HEADER, _consumer_rows(buffers))
        + _show.html_lines(_notes(buffers))
    )
