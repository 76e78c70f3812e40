"""Nothing lost, nothing stuck: the clients' journals against each other and against the server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from experience_buffer import Client, Stats
from tests.soak.clients import WORKERS
from tests.soak.plan import LATE, QUEUE, REPLAY, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What became of everything that was pushed."""

    num_acked: int
    """Experiences that the server said were stored."""
    num_trained: int
    """Experiences that the last policy has learned from."""
    num_evicted: int
    problems: tuple[str, ...]
    """In words; empty when nothing was lost, doubled or stuck."""


def timeline(entries: Iterable[dict[str, Any]]) -> list[str]:
    """The uids that a trainer has learned from and not gone back behind."""
    learned: dict[int, Sequence[str]] = {}
    for entry in entries:
        if entry["event"] == "resumed":
            learned = {step: uids for step, uids in learned.items() if step <= entry["step"]}
        elif entry["event"] == "trained":
            learned[entry["step"]] = entry["uids"]
    return [uid for uids in learned.values() for uid in uids]


def audit(plan: Plan, client: Client, *, metrics: str) -> Audit:
    """Compare, after everything was drained.

    Args:
        plan: The soak's.
        client: To look at what is still there.
        metrics: The server's, as text.
    """
    num_evicted = _evicted(metrics)
    pushed = {role: _pushed(plan.events(role)) for role in WORKERS}
    queued = pushed["worker S"].acked | pushed["worker M"].acked
    offered = pushed["worker S"].tried | pushed["worker M"].tried
    trained = Counter(timeline(plan.events("trainer")))
    logged = {uid for one in plan.events("logger") if "uids" in one for uid in one["uids"]}
    learned = {uid for one in plan.events("critic") if "uids" in one for uid in one["uids"]}
    replayed = pushed["replay worker"]
    stats = client.get_stats()
    held = {one.name: one.num_items for one in stats.buffers}
    least, most = len(replayed.acked), len(replayed.tried)
    problems = [
        *_some("acknowledged and never trained on", queued - trained.keys()),
        *_some("trained on twice", {uid for uid, count in trained.items() if count > 1}),
        *_some("trained on and never pushed", trained.keys() - offered),
        *_some("acknowledged and never logged", queued - logged),
        *_some("acknowledged and never learned from", pushed["late worker"].acked - learned),
        # A worker that stood still for longer than a group's deadline is late.
        *_some("refused", {one for each in pushed.values() for one in each.refusals} - {"late"}),
        *_some("series of deleted buffers", set(re.findall(r'buffer="scratch-[0-9]+"', metrics))),
        *_left(stats),
    ]
    if not least <= num_evicted + held[REPLAY] <= most:
        problems.append(
            f"of {least} to {most} replayed experiences {num_evicted} were evicted and "
            f"{held[REPLAY]} are there"
        )
    return Audit(
        num_acked=sum(len(one.acked) for one in pushed.values()),
        num_trained=len(trained),
        num_evicted=num_evicted,
        problems=tuple(problems),
    )


@dataclass(frozen=True, slots=True)
class _Pushed:
    tried: set[str]
    acked: set[str]
    refusals: list[str]


def _pushed(entries: list[dict[str, Any]]) -> _Pushed:
    def uids(event: str) -> set[str]:
        return {uid for one in entries if one["event"] == event for uid in one["uids"]}

    refusals = [reason for one in entries for reason in one.get("refused", ())]
    return _Pushed(uids("pushing"), uids("pushed"), refusals)


def _evicted(metrics: str) -> int:
    """How many experiences of the replay buffer made room for others."""
    name = "experience_buffer_dropped_experiences_total"
    row = rf'^{name}{{buffer="{REPLAY}",reason="evicted"}} (\S+)$'
    return int(sum(map(float, re.findall(row, metrics, re.MULTILINE))))


def _some(what: str, found: set[str]) -> list[str]:
    if not found:
        return []
    first = ", ".join(sorted(found)[:3])
    return [f"{len(found)} {what}, such as {first}"]


def _left(stats: Stats) -> list[str]:
    """What should have been consumed, or given back, and wasn't."""
    problems = []
    for buffer in stats.buffers:
        if buffer.num_items and buffer.name in (QUEUE, LATE):
            problems.append(f"{buffer.num_items} experiences are left in {buffer.name!r}")
        if buffer.num_open_groups or buffer.num_quarantined_groups:
            problems.append(f"groups are left in {buffer.name!r}: {buffer.oldest_open_group}")
        num_leases = sum(consumer.num_leases for consumer in buffer.consumers)
        if num_leases:
            problems.append(f"{num_leases} leases of {buffer.name!r} are open")
        if buffer.name.startswith("scratch"):
            problems.append(f"{buffer.name!r} was not deleted")
    return problems
