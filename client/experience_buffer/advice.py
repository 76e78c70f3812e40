"""What in a server's statistics needs a person: sentences, each with what to do. Pure.

The command line's `status` and `why`, and the overview of the page, say the same by it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from experience_buffer import _show
from experience_buffer._show import Rows, Shown
from experience_buffer.stats import BufferStats, ConsumerStats, DiskStats, Stats

__all__ = ["Advice", "Severity", "View", "advise"]
__dir__ = __all__.copy

Severity: TypeAlias = Literal["critical", "warning", "info"]
"""How bad it is: "critical": work is lost now, or soon; "warning": somebody waits, or will, until a
person sees to it; "info": it passes by itself, and explains a wait."""
View: TypeAlias = Literal[
    "overview", "buffer", "groups", "consumers", "leases", "search", "departures"
]
"""Where the page shows what it is made of."""

_SEVERITIES: Final = ("critical", "warning", "info")
_BRIEF_SECONDS: Final = 10.0
"""Trainers wait for workers all the time: so short a wait needs nobody."""
_LONG_SECONDS: Final = 900.0
"""From here on a wait is as bad as the alert of the same name says."""
_SOON_SECONDS: Final = 8 * 3600.0
_NOW_SECONDS: Final = 3600.0
_FULL_RATIO: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Advice(Shown):
    """One thing that needs a person, or explains a wait.

    Attributes:
        severity: How bad it is: "critical", "warning" or "info".
        kind: What it is, in a word that stays the same: "damaged", "pushes_wait", "sample_waits",
            "overdue_groups", "quarantined_groups", "quarantined_units", "missing_fields", "held",
            "limited", "disk", "filling", "archive".
        buffer: The buffer's name; empty where it isn't about one.
        consumer: The consumer's name; empty where it isn't about one.
        text: What is, in a sentence without its full stop.
        cure: What to do, in a sentence without its full stop; empty where nothing needs to be done.
        command: What to type to look at it or to end it; empty where nothing fits.
        view: The view of the page that shows it: "overview", "buffer", "groups", "consumers",
            "leases", "search" or "departures".
        waits: Whether somebody waits now: a consumer for a batch, or pushes for room.
    """

    severity: Severity
    kind: str
    buffer: str = ""
    consumer: str = ""
    text: str
    cure: str = ""
    command: str = ""
    view: View = "buffer"
    waits: bool = False

    def __repr__(self) -> str:
        return _show.line(f"<Advice {self.severity}: {self.text}>")

    def __str__(self) -> str:
        return f"{self.text}: {self.cure}" if self.cure else self.text


def advise(stats: Stats) -> tuple[Advice, ...]:
    """Say what needs a person, worst first; nothing where nothing does and nobody waits.

    Args:
        stats: What `get_stats` returned.
    """
    found = [*_of_disk(stats.disk)]
    found += [each for buffer in stats.buffers for each in _of_buffer(buffer)]
    # What makes somebody wait comes before what will.
    found.sort(key=lambda each: (_SEVERITIES.index(each.severity), not each.waits))
    return Rows(found)


def _of_disk(disk: DiskStats | None) -> Iterator[Advice]:
    if disk is None:
        return
    seconds = disk.full_in_seconds
    is_full = disk.used_ratio is not None and disk.used_ratio >= _FULL_RATIO
    is_soon = seconds is not None and seconds < _SOON_SECONDS
    if not (is_full or is_soon):
        return
    is_now = is_full or (seconds is not None and seconds < _NOW_SECONDS)
    limit = "the disk" if disk.full_by == "disk" else "store.max_map_bytes"
    yield Advice(
        severity="critical" if is_now else "warning",
        kind="disk",
        text=str(disk),
        cure=f"let consumers take what is stored, delete what nobody needs, or make room: {limit} "
        "is the limit",
        command="experience-buffer buffers",
        view="overview",
    )


def _of_buffer(buffer: BufferStats) -> Iterator[Advice]:
    name = buffer.name
    if buffer.num_damaged:
        yield Advice(
            severity="critical",
            kind="damaged",
            buffer=name,
            text=f"{_show.counted(buffer.num_damaged, 'experience')} of {name} can't be read back from "
            "the disk",
            cure="see which; push them again, or restore a snapshot; check the disk",
            command=_command("list", name, "--state quarantined"),
            view="search",
        )
    yield from _of_pushes(buffer)
    if (seconds := buffer.full_in_seconds) is not None and 0 < seconds < _NOW_SECONDS:
        yield Advice(
            severity="info",
            kind="filling",
            buffer=name,
            text=f"{name} will have reached its {buffer.full_by or 'limit'} in "
            f"{_show.duration(seconds)} at this rate",
            cure="pushes wait, are refused or make room then, as on_full says",
            view="buffer",
        )
    if count := buffer.num_quarantined_groups:
        yield Advice(
            severity="warning",
            kind="quarantined_groups",
            buffer=name,
            text=f"the advantages of {_show.counted(count, 'group')} of {name} can't be computed",
            cure="list says why: annotate what is missing, or delete them",
            command=_command("list", name, "--state quarantined"),
            view="search",
        )
    if count := buffer.num_overdue_groups:
        oldest = f"; {buffer.oldest_open_group}" if buffer.oldest_open_group else ""
        yield Advice(
            severity="warning",
            kind="overdue_groups",
            buffer=name,
            text=f"{_show.counted(count, 'group')} of {name} {_are(count)} past the deadline{oldest}",
            cure="push what is missing, or seal or drop them; on_group_deadline = "
            '"use_partial" or "drop" does so by itself',
            command=_command("groups", name),
            view="groups",
        )
    if count := buffer.num_waiting_for_fields:
        yield Advice(
            severity="info",
            kind="missing_fields",
            buffer=name,
            text=f"{_show.counted(count, 'experience')} of {name} {'wait' if count > 1 else 'waits'} for "
            "fields that the estimator needs",
            cure="add them with annotate",
            command=_command("list", name, "--state waiting_for_fields"),
            view="search",
        )
    yield from _of_archive(buffer)
    for consumer in buffer.consumers:
        yield from _of_consumer(buffer, consumer)


def _of_archive(buffer: BufferStats) -> Iterator[Advice]:
    archive = buffer.archive
    if archive is None or not (archive.trouble or archive.num_lost):
        return
    name, lost = buffer.name, ""
    if archive.num_lost:
        lost = (
            f"{_show.counted(archive.num_lost, 'experience')} of {name} left without being archived"
        )
    yield Advice(
        severity="warning",
        kind="archive",
        buffer=name,
        text=f"the archive of {name} has trouble: {archive.trouble}" if archive.trouble else lost,
        cure=(
            "free space, or see to its folder beside the store; what has left waits meanwhile"
            if archive.trouble
            else "raise archive.max_pending_bytes, or let less leave at a time: it doesn't keep up"
        ),
        view="departures",
    )


def _of_pushes(buffer: BufferStats) -> Iterator[Advice]:
    if not buffer.pushes_wait_for:
        return
    idle = _idle(buffer)
    cure = "the words above name the setting; consumers make room by acknowledging"
    if idle is not None:
        units = _show.counted(idle.num_ready_units, idle.unit)
        cure = (
            f"consumer {idle.name} has {units} ready and takes none: start its trainer, or remove "
            "it where nobody needs it"
        )
    yield Advice(
        # Full is normal where workers are faster than trainers; with nobody who takes it stays so.
        severity="warning" if idle is None else "critical",
        kind="pushes_wait",
        buffer=buffer.name,
        consumer="" if idle is None else idle.name,
        text=f"pushes to {buffer.name} find no room: {buffer.pushes_wait_for}",
        cure=cure,
        command=_command("why", buffer.name),
        waits=True,
    )


def _of_consumer(buffer: BufferStats, consumer: ConsumerStats) -> Iterator[Advice]:
    of = f"{consumer.name} of {buffer.name}"
    if consumer.num_waiting:
        cure, command, view = _cure_of_wait(buffer, consumer)
        yield Advice(
            severity=_severity_of(consumer.waiting_seconds),
            kind="sample_waits",
            buffer=buffer.name,
            consumer=consumer.name,
            text=f"consumer {of} {_waits(consumer)}: {consumer.waiting_for}",
            cure=cure,
            command=command,
            view=view,
            waits=True,
        )
    if count := consumer.num_quarantined_units:
        yield Advice(
            severity="warning",
            kind="quarantined_units",
            buffer=buffer.name,
            consumer=consumer.name,
            text=f"{_show.counted(count, consumer.unit)} came back from {of} too often and "
            f"{_are(count)} not offered any more",
            cure="see what its trainer's log says of them; then release or delete them",
            command=_command("release", buffer.name, f"--all -c {shlex.quote(consumer.name)}"),
            view="search",
        )
    if (count := consumer.num_held_units) and not consumer.num_waiting:
        yield Advice(
            severity="info",
            kind="held",
            buffer=buffer.name,
            consumer=consumer.name,
            text=f"{_show.counted(count, consumer.unit)} {_are(count)} held from {of}: the policy "
            f"version {'is' if count == 1 else 'are'} not published yet, or not known",
            cure=_publish(buffer),
            view="consumers",
        )
    if consumer.pushes_wait_for:
        yield Advice(
            severity="info",
            kind="limited",
            buffer=buffer.name,
            consumer=consumer.name,
            text=f"pushes to {buffer.name} are held back for {consumer.name}: "
            f"{consumer.pushes_wait_for}",
            cure="workers go on when it has sampled more; nothing needs to be done where it trains",
            view="consumers",
        )


def _severity_of(seconds: float | None) -> Severity:
    if seconds is None:
        return "warning"
    if seconds < _BRIEF_SECONDS:
        return "info"
    return "warning" if seconds < _LONG_SECONDS else "critical"


def _waits(consumer: ConsumerStats) -> str:
    """Since when it waits, and who it is: "(gpu-3:4711) has waited 41 s"."""
    who, *others = consumer.waiting_holders or ("",)
    more = f" and {len(others)} more" if others else ""
    named = f"({who}{more}) " if who else ""
    if consumer.waiting_seconds is None:
        return f"{named}waits"
    return f"{named}has waited {_show.duration(consumer.waiting_seconds)}"


def _cure_of_wait(buffer: BufferStats, consumer: ConsumerStats) -> tuple[str, str, View]:
    """Cure, command and view for what a waiting consumer waits for: the nearest cause first."""
    name, reason = buffer.name, consumer.wait_reason
    lacks = _lacks(buffer, consumer)
    if reason in ("min_size", "min_diff"):
        return (
            "its limiter holds it back: let workers push more, or change the limiter's "
            f"{'min_size' if reason == 'min_size' else 'samples_per_insert'}",
            _command("buffers", name, named=True),
            "consumers",
        )
    if buffer.pushes_wait_for and reason != "window":
        return (
            "make room for pushes first: what is missing may not find a place",
            _command("why", name),
            "buffer",
        )
    if reason == "window" or (consumer.num_leased_units and not lacks):
        return (
            "acknowledge what is on lease: see who holds it; what died with its trainer comes back "
            "when its lease expires",
            _command("leases", name),
            "leases",
        )
    if reason == "held" or (not reason and consumer.num_held_units):
        return (_publish(buffer), "", "consumers")
    if consumer.num_quarantined_units and not buffer.num_open_groups:
        return (
            "what is left came back too often: see its trainer's log, then release or delete it",
            _command("release", name, f"--all -c {shlex.quote(consumer.name)}"),
            "search",
        )
    if buffer.num_open_groups and reason != "computing":
        return (
            "see what is missing; workers that are at it will push it, and for those that died seal "
            "or drop the groups, or set group_deadline_seconds",
            _command("groups", name),
            "groups",
        )
    if buffer.num_waiting_for_fields:
        return (
            "add the missing fields with annotate",
            _command("list", name, "--state waiting_for_fields"),
            "search",
        )
    if buffer.num_quarantined_groups:
        return (
            "list says why what is there can't be computed: annotate or delete it",
            _command("list", name, "--state quarantined"),
            "search",
        )
    if buffer.num_computing_groups:
        return ("nothing: they are being computed", "", "groups")
    return (
        f"let workers push more: are they running, and do they push to {name}?",
        _command("tail", name),
        "buffer",
    )


def _lacks(buffer: BufferStats, consumer: ConsumerStats) -> bool:
    """Whether something is on its way to the consumer, but not ready."""
    return bool(
        buffer.num_open_groups
        or buffer.num_computing_groups
        or buffer.num_waiting_for_fields
        or consumer.num_held_units
    )


def _idle(buffer: BufferStats) -> ConsumerStats | None:
    """The consumer that has most to take, and takes none."""
    idle = [
        each
        for each in buffer.consumers
        if each.num_ready_units and not each.num_waiting and not each.num_leases
    ]
    return max(idle, key=lambda each: each.num_ready_units, default=None)


def _publish(buffer: BufferStats) -> str:
    newest = buffer.policy_version
    said = "none is so far" if newest is None else f"{newest} is the newest"
    return f"publish the trainer's policy version with publish_policy_version; {said}"


def _command(verb: str, buffer: str, options: str = "", *, named: bool = False) -> str:
    quoted = shlex.quote(buffer)
    parts = ("experience-buffer", verb, quoted if named else f"-b {quoted}", options)
    return " ".join(part for part in parts if part)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
