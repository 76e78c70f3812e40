"""What looking costs: each look at a large store, each command, and a load while somebody looks.

`make bench-looking`. A store is written first, without a server; then a server starts on it, is asked for
everything that can be looked at, and last carries a load in turns, without and with `top` running and
the page open. Every look takes server time of one event loop: the target is 200 ms for each, and 3 % of
what pushes and batches cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.scale_fill import BUFFER, fill
from benchmarks.servers import Server, running_server
from benchmarks.workload import GROUP_SIZE
from experience_buffer import EID, Client, Experience
from experience_buffer.errors import UnsupportedError
from experience_buffer_server.commands.bench_load import Load

_MOST_MILLISECONDS: Final = 200.0
_MOST_SHARE: Final = 0.03
_PATIENCE_SECONDS: Final = 300.0
_OPEN_GROUPS: Final = 1000
_EVENTS: Final = "events"
"""What a tab of the overview listens to, below /api/v1/."""
_GROUPS: Final = (f"buffers/{BUFFER}/groups", f"buffers/{BUFFER}/stats")
"""What a tab of the groups asks for again and again."""
_GROUPS_SECONDS: Final = 3.0
_IDLE_SECONDS: Final = 10.0

Look = Callable[[Client], object]
LOOKS: Final[dict[str, Look]] = {
    "GetStats": lambda client: client.get_stats(),
    "ListBuffers": lambda client: client.list_buffers(),
    "ListGroups, stuck first": lambda client: _page(client.list_groups(buffer=BUFFER)),
    "ListGroups, newest first": lambda client: _page(
        client.list_groups(buffer=BUFFER, order="newest")
    ),
    "ListGroups, by key": lambda client: _page(client.list_groups(buffer=BUFFER, order="key")),
    "ListGroups, leased": lambda client: _page(client.list_groups(buffer=BUFFER, state="leased")),
    "ListGroups, prefix": lambda client: _page(
        client.list_groups(buffer=BUFFER, prefix="b/task-00001")
    ),
    "GetGroup": lambda client: client.get_group("b/task-0000007", buffer=BUFFER),
    "ListLeases": lambda client: _page(client.list_leases(buffer=BUFFER)),
    "List": lambda client: _page(client.list(buffer=BUFFER)),
    "List, newest first": lambda client: _page(client.list(buffer=BUFFER, newest_first=True)),
    "List, a task's": lambda client: _page(client.list(buffer=BUFFER, tid="b/task-0000007")),
    "List, a reward's": lambda client: _page(client.list(buffer=BUFFER, reward=(1.0, None))),
    "List, leased": lambda client: _page(client.list(buffer=BUFFER, state="leased")),
    "Get": lambda client: client.get(next(iter(client.list(buffer=BUFFER))).uid, buffer=BUFFER),
    "GetTrends": lambda client: client.get_trends(BUFFER),
    "ListSteps": lambda client: client.list_steps(buffer=BUFFER),
    "ListDepartures": lambda client: client.list_departures(buffer=BUFFER),
}
"""What can be asked: a page each."""
WHOLE: Final[dict[str, Look]] = {
    "List, all pages, nothing found": lambda client: list(
        client.list(buffer=BUFFER, reward=(7.0, None), page_size=1000)
    ),
}
"""What takes many calls: no one of them may keep the loop for long."""
COMMANDS: Final = (
    *(["status"], ["why"], ["buffers"], ["groups"], ["leases"], ["list"], ["steps"]),
    *(["departures"], ["groups", "b/task-0000007"], ["version"]),
)


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiences", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=10, help="of each look")
    parser.add_argument("--turns", type=int, default=8, help="of the load, half of them looked at")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--data", type=Path, help="keep the store here, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        if not data.exists():
            num_groups = options.experiences // GROUP_SIZE
            began = time.perf_counter()
            asyncio.run(fill(data, num_groups))
            print(
                f"{options.experiences:,} experiences stored in {time.perf_counter() - began:.0f} s"
            )
        arguments = ("--metrics-port", "0")
        with running_server(data, *arguments, start_seconds=_PATIENCE_SECONDS) as server:
            with Client(server.address, timeout=60.0) as client:
                _unfinished(client)
                looks(server, client, options.repeats)
            commands(server)
            idle(server, _pages(data))
            turns(server, _pages(data), options)


def _page(pages: Any) -> list[Any]:
    return list(islice(pages, 100))


def _unfinished(client: Client) -> None:
    """Groups of which a member is there, and leases, so that there is something to find."""
    client.push(
        [
            Experience(
                eid=EID(batch="open", task=task, run=0), prompt=[1], response=[2], reward=0.5
            )
            for task in range(_OPEN_GROUPS)
        ],
        buffer=BUFFER,
    )
    for _ in range(20):
        client.sample(64, buffer=BUFFER, timeout=5.0, lease_seconds=3600.0)


def looks(server: Server, client: Client, repeats: int) -> None:
    """Ask for everything that can be looked at: how long it takes, and what it costs the server."""
    print(f"\n{'look':36}{'p50 ms':>9}{'max ms':>9}{'server CPU ms':>15}", flush=True)
    for name, look in LOOKS.items():
        _measure(name, look, server, client, repeats)
    for name, look in WHOLE.items():
        _measure(name, look, server, client, 2, is_one=False)


def _measure(
    name: str, look: Look, server: Server, client: Client, repeats: int, *, is_one: bool = True
) -> None:
    try:
        look(client)
    except UnsupportedError:
        print(f"{name:36} the server doesn't answer it")
        return
    before = server.cpu_seconds()["server"]
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        look(client)
        taken.append((time.perf_counter() - began) * 1e3)
    cpu = (server.cpu_seconds()["server"] - before) / repeats * 1e3
    verdict = "" if not is_one or cpu < _MOST_MILLISECONDS else f"  OVER {_MOST_MILLISECONDS:g} ms"
    print(
        f"{name:36}{statistics.median(taken):9.1f}{max(taken):9.1f}{cpu:15.1f}{verdict}", flush=True
    )


def commands(server: Server) -> None:
    """Run commands: how long until their first line, and until they have ended."""
    print(f"\n{'command':36}{'first line ms':>14}{'in all ms':>11}", flush=True)
    for words in COMMANDS:
        firsts, wholes = [], []
        for _ in range(3):
            first, whole = _run(server, words)
            firsts.append(first)
            wholes.append(whole)
        print(f"{' '.join(words):36}{min(firsts):14.0f}{min(wholes):11.0f}", flush=True)


def _run(server: Server, words: Sequence[str]) -> tuple[float, float]:
    command = [sys.executable, "-m", "experience_buffer_server", *words]
    if words[0] != "version":
        command += ["--address", server.address]
    if words[0] in ("groups", "leases", "list", "steps", "departures"):
        command += ["--buffer", BUFFER]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - began
        process.stdout.read()
    return first * 1e3, (time.perf_counter() - began) * 1e3


def idle(server: Server, pages: str) -> None:
    """What looking costs a server that has nothing else to do: a busy one loses as much of its loop."""
    shares = []
    for watched in (False, True):
        with ExitStack() as stack:
            if watched:
                stack.enter_context(_top(server))
                stack.enter_context(_page_open(pages))
                time.sleep(2.0)  # Until they are there.
            before = server.cpu_seconds()["server"]
            time.sleep(_IDLE_SECONDS)
            shares.append((server.cpu_seconds()["server"] - before) / _IDLE_SECONDS)
    quiet, looked_at = shares
    verdict = "" if looked_at - quiet < _MOST_SHARE else f"  OVER {_MOST_SHARE:.0%}"
    print(
        f"\nidle: {quiet:.1%} of a core; with top and two tabs of the page: {looked_at:.1%}{verdict}",
        flush=True,
    )


def turns(server: Server, pages: str, options: argparse.Namespace) -> None:
    """Carry a load in turns, without anybody who looks and with `top` and the page."""
    if options.turns < 2:
        return
    print(f"\n{'load':36}{'pushed/s':>10}{'trained/s':>11}{'server CPU us each':>20}", flush=True)
    found: dict[str, list[tuple[float, float, float]]] = {"nobody looks": [], "top and page": []}
    for number in range(options.turns):
        name = list(found)[number % 2]
        with ExitStack() as stack:
            if number % 2:
                stack.enter_context(_top(server))
                stack.enter_context(_page_open(pages))
            figures = _turn(server, options.seconds)
        if number >= 2:  # Those before warm up.
            found[name].append(figures)
        print(f"{name:36}{figures[0]:10,.0f}{figures[1]:11,.0f}{figures[2]:20.0f}", flush=True)
    if options.turns < 4:
        return
    quiet, watched = (
        [statistics.median(values) for values in zip(*found[name], strict=True)] for name in found
    )
    for what, before, after in zip(("pushed/s", "trained/s", "CPU"), quiet, watched, strict=True):
        share = after / before - 1
        print(f"{what} with somebody who looks: {share:+.1%} (target: {_MOST_SHARE:.0%})")


def _turn(server: Server, seconds: float) -> tuple[float, float, float]:
    """Experiences pushed and trained on per second, and the server's CPU time for each."""
    load = Load(f"turn-{time.time_ns()}", seconds, tokens=256, group_size=8, batch=8, workers=1)
    before = server.cpu_seconds()["server"]
    with Client(server.address, timeout=60.0) as client:
        try:
            measured = load.run(client)
        finally:
            used = server.cpu_seconds()["server"] - before
            client.delete_buffer(load.buffer, force=True)
    rates = {each.what: each.experiences_per_second for each in measured.calls}
    count = (rates["push"] + rates["ack"]) * measured.seconds
    return rates["push"], rates["ack"], used / count * 1e6


@contextmanager
def _top(server: Server) -> Iterator[None]:
    """`top` in a terminal that nobody reads from but us."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "experience_buffer_server", "top", "--address", server.address]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    threading.Thread(target=_swallow, args=(ours,), daemon=True).start()
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def _swallow(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        pass  # The terminal has gone.


@contextmanager
def _page_open(pages: str) -> Iterator[None]:
    """Two tabs: one of the overview, and one of the groups."""
    stopped = threading.Event()

    def listen() -> None:
        with urllib.request.urlopen(f"{pages}/api/v1/{_EVENTS}", timeout=30) as answer:
            while not stopped.is_set() and answer.readline():
                pass

    def ask() -> None:
        while not stopped.wait(_GROUPS_SECONDS):
            for path in _GROUPS:
                with urllib.request.urlopen(f"{pages}/api/v1/{path}", timeout=10) as answer:
                    answer.read()

    threads = [threading.Thread(target=work, daemon=True) for work in (listen, ask)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(20)


def _pages(data: Path) -> str:
    """Where the server's pages are, which its log says."""
    for line in data.with_name("server.log").read_text("utf-8").splitlines():
        if '"listening"' in line:
            return f"http://127.0.0.1:{json.loads(line)['metrics_port']}"
    raise RuntimeError("the server's log doesn't say where it listens")


if __name__ == "__main__":
    main()
