"""One soak from start to verdict."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from experience_buffer import Client
from tests.integration.server import DEFAULT_MODULE, Server, eventually
from tests.soak.audit import Audit, audit
from tests.soak.clients import CONSUMERS, OPERATOR, WORKERS, Clients, Kill
from tests.soak.plan import LATE, QUEUE, REPLAY, Plan, buffers
from tests.soak.verdict import Call, Limits, Line, judge
from tests.soak.watch import Watch

WINDOW_SECONDS: Final = 60.0
CONFIGURATION: Final = """
[snapshots]
path = "snapshots"
keep = 2
"""
"""Of the server; all else is as by default."""
_DRAIN_SECONDS: Final = 60.0
_TICK_SECONDS: Final = 0.1
_KINDS: Final = {"pushed": "push", "sampled": "sample", "acked": "ack"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    start: float
    """When the load began, by `time.monotonic`."""
    warm: float
    """When the warm-up ended."""
    end: float
    """When the load ended."""
    watch: Watch
    calls: list[Call]
    kills: list[Kill]
    chores: Counter[str]
    """How often each was done."""
    audit: Audit
    lines: list[Line]

    @property
    def minutes(self) -> list[float]:
        """Of the samples, since the load began."""
        return [self.minute(sample.time) for sample in self.watch.samples]

    def minute(self, time: float) -> float:
        return (time - self.start) / 60

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.lines)


def soak(
    folder: Path,
    *,
    seconds: float,
    seed: int = 20,
    limits: Limits | None = None,
    say: Callable[[str], None] = lambda text: None,
    server: Server | None = None,
) -> Outcome:
    """Run a server under load for a while.

    Args:
        folder: Empty; for the server, journals and samples.
        seconds: Of load. After `warm_up` of them a minute at both ends is compared, less if it is short.
        seed: Of who is killed when.
        limits: What counts as flat.
        say: Told of progress.
        server: Not started; None: one with `CONFIGURATION`.
    """
    server = server or Server(folder / "server", toml=CONFIGURATION, compiled_reader=True)
    journals = folder / "journals"
    journals.mkdir(parents=True)
    try:
        server.start()
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        plan = Plan(address=server.address, metrics_url=url, folder=journals)
        with plan.client() as client:
            for config in buffers():
                client.create_buffer(config)
            watch = Watch(server, client, folder / "probe")
            with Clients(plan, random.Random(seed)) as clients:
                clients.wait_until_pushing()
                start, end = _load(clients, watch, seconds, say)
                _report(server)
                say("draining")
                clients.finish_pushing()
                _drain(client)
                clients.check()
            found, calls, lines = _conclude(plan, client, watch, start, end, limits or Limits())
        assert server.stop() == 0, f"the server didn't end well:\n{server.tail()}"
        return Outcome(
            start=start,
            warm=start + warm_up(end - start),
            end=end,
            watch=watch,
            calls=calls,
            kills=clients.kills,
            chores=Counter(one["chore"] for role in OPERATOR for one in plan.events(role)),
            audit=found,
            lines=lines,
        )
    finally:
        server.close()


def warm_up(seconds: float) -> float:
    """After how many seconds of load things are to be flat: two minutes of ten, one of three."""
    return max(seconds / 5, min(seconds * 0.4, 60.0))


def _load(
    clients: Clients, watch: Watch, seconds: float, say: Callable[[str], None]
) -> tuple[float, float]:
    """Look every second, kill now and then; when the load began and ended."""
    pause, start = threading.Event(), time.monotonic()
    next_look, next_word, is_warm = start, start, False
    while (now := time.monotonic()) < start + seconds:
        clients.tick()
        clients.check()
        if not is_warm and now >= start + warm_up(seconds):
            is_warm = True
            _report(watch.server)
        if now >= next_look:
            next_look = max(next_look + 1.0, now)
            sample = watch.look()
            if now >= next_word:
                next_word = now + 10.0
                memory = sample.processes["server"].memory_bytes / 1e6
                queued, num_kills = sample.depths["queue"], len(clients.kills)
                say(f"{now - start:4.0f} s: {memory:.1f} MB, {queued} queued, {num_kills} killed")
        pause.wait(_TICK_SECONDS)
    return start, time.monotonic()


def _report(server: Server) -> None:
    """Have a traced server say what its memory holds; others are left alone."""
    if server.module != DEFAULT_MODULE:
        server.signal(signal.SIGUSR1)


def _drain(client: Client) -> None:
    """Wait until all that can be consumed is consumed; what is not in time, the audit reports."""
    # What was made with versions that a trainer has gone back behind is held until then.
    client.publish_policy_version(10**6, buffer=QUEUE)

    def is_drained() -> bool:
        waiting = (one for one in client.list(buffer=QUEUE) if one.state != "retained")
        left = next(waiting, None) or next(client.list(buffer=LATE), None)
        return left is None and not _num_leases(client, but=REPLAY)

    with contextlib.suppress(AssertionError):
        eventually(is_drained, "the queues to drain", seconds=_DRAIN_SECONDS)


def _num_leases(client: Client, *, but: str = "") -> int:
    buffers = [one for one in client.get_stats().buffers if one.name != but]
    return sum(consumer.num_leases for buffer in buffers for consumer in buffer.consumers)


def _conclude(
    plan: Plan, client: Client, watch: Watch, start: float, end: float, limits: Limits
) -> tuple[Audit, list[Call], list[Line]]:
    with contextlib.suppress(AssertionError):
        # Those of clients that were killed in the end.
        eventually(lambda: not _num_leases(client), "no lease", seconds=_DRAIN_SECONDS)
    consumers = {one.name: one for one in client.get_stats(QUEUE).buffers[0].consumers}
    client.declare_safe(consumers["trainer"].last_step or 0, buffer=QUEUE)
    found = audit(plan, client, metrics=watch.server.metrics())
    calls = [call for role in (*WORKERS, *CONSUMERS) for call in _calls(plan, role)]
    warm = start + warm_up(end - start)
    window = min(WINDOW_SECONDS, (end - warm) / 3)
    stuck, lost = watch.stuck_seconds, "; ".join(found.problems)
    lines = [
        *judge(watch.samples, calls, begin=warm, end=end, window=window, limits=limits),
        Line("groups beyond their deadline", f"{stuck:.1f} s", "0 s", not stuck),
        Line(f"lost or stuck, of {found.num_acked:,} pushed", lost or "none", "none", not lost),
    ]
    return found, calls, lines


def _calls(plan: Plan, role: str) -> list[Call]:
    return [
        Call(kind=_KINDS[one["event"]], time=one["time"], seconds=one["seconds"])
        for one in plan.events(role)
        if one["event"] in _KINDS
    ]


def write_lines(outcome: Outcome, path: Path) -> None:
    """Write samples, kills and the verdict as lines of JSON, times in seconds since the start."""
    entries: list[dict[str, Any]] = []
    entries += [{"kind": "sample", **asdict(one)} for one in outcome.watch.samples]
    entries += [{"kind": "kill", **asdict(one)} for one in outcome.kills]
    for entry in entries:
        entry["time"] -= outcome.start
    entries += [{"kind": "verdict", **asdict(line)} for line in outcome.lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
