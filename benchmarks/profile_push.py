"""`python -m benchmarks.profile_push`: where the CPU time of a durable push goes.

Microseconds of CPU per experience, from the kernel's own accounts (`/proc/PID/task/TID/stat`) over
a window of steady work: the client's processes, the server's event loop and its other threads
(gRPC's), and the two threads of its store writer. Beside them what some of the steps take alone,
in this process, without gRPC: encoding in the client; in the server reading a payload and admitting
its experiences, with the canonical payload and its digest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compare.processes import Fleet
from benchmarks.experiences import group
from benchmarks.workload import GROUP_SIZE, POOL_GROUPS, SIZES, Size
from experience_buffer import trxp
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.settings.buffer import BufferSettings

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAD_SECONDS = 0.8
_STEP_SECONDS = 0.3
_MANY = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What pushing one experience costs, CPU microseconds by whom."""

    rate: float
    """Experiences per second."""
    client: float
    event_loop: float
    grpc_threads: float
    """The server's threads but the event loop's: gRPC's."""
    store_commit: float
    """The store writer's main thread: transactions and their fsync."""
    store_receive: float
    """The store writer's other thread."""
    idle: float
    """Part of the cores' time in which nobody worked, 0 to 1."""

    @property
    def total(self) -> float:
        """Of all processes."""
        server = self.event_loop + self.grpc_threads + self.store_commit + self.store_receive
        return self.client + server


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", default=["push", "writer"])
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; CPU us per experience\n")
    _print_steps(options.sizes)
    print(
        f"\n{options.writers} writers, acks after the fsync\n\n"
        "| | experiences/s | client | of it encoding | event loop | gRPC's threads | "
        "store: commit | store: receive | all | cores idle |\n" + "|---" * 10 + "|"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="profile-")))
        fleet = Fleet("ours", options.writers, folder)
        stack.callback(fleet.end)
        for size in options.sizes:
            for mode in options.modes:
                split = _measure(fleet, size, mode, options.seconds)
                _print(size, mode, split)


def _print_steps(sizes: Sequence[str]) -> None:
    print("| alone | encode | read | admit |\n|---|---|---|---|")
    for name in sizes:
        cells = " | ".join(f"{value:.1f}" for value in steps(SIZES[name]).values())
        print(f"| {name} | {cells} |", flush=True)


def _print(size: str, mode: str, split: Split) -> None:
    encoding = steps(SIZES[size])["encode"]
    cells = (
        *(split.client, encoding, split.event_loop, split.grpc_threads),
        *(split.store_commit, split.store_receive, split.total),
    )
    shown = " | ".join(f"{value:.0f}" for value in cells)
    print(f"| {size}, {mode} | {split.rate:,.0f} | {shown} | {split.idle:.0%} |", flush=True)


def steps(size: Size) -> dict[str, float]:
    """Microseconds per experience of what can be called alone, groups of 8 at a time."""
    groups = [group(size, 0, number) for number in range(POOL_GROUPS)]
    payloads = [trxp.encode(experiences) for experiences in groups]
    read = [trxp.read(payload) for payload in payloads]
    settings = BufferSettings(group_size=GROUP_SIZE)

    def admit_group(number: int) -> None:
        for item in read[number]:
            assert isinstance(item, trxp.Item)
            admit(item, settings)

    return {
        "encode": _per_experience(lambda number: trxp.encode(groups[number])),
        "read": _per_experience(lambda number: trxp.read(payloads[number])),
        "admit": _per_experience(admit_group),
    }


def _per_experience(step: Callable[[int], object]) -> float:
    step(0)
    count, started = 0, time.thread_time()
    while (seconds := time.thread_time() - started) < _STEP_SECONDS:
        step(count % POOL_GROUPS)
        count += 1
    return seconds / count / GROUP_SIZE * 1e6


def _measure(fleet: Fleet, size: str, mode: str, seconds: float) -> Split:
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        served = fleet.host.call("serve", folder=folder, size=size, variant="")
        for number, writer in enumerate(fleet.writers):
            writer.call("write", address=served["address"], size=size, writer=number, mode=mode)
        start = time.monotonic() + _LEAD_SECONDS
        for writer in fleet.writers:
            writer.start("push", start=start, seconds=seconds, max_groups=_MANY)
        time.sleep(max(start - time.monotonic(), 0.0))
        before, idle = _threads(served["processes"]), _idle_seconds()
        time.sleep(max(start + seconds - time.monotonic(), 0.0))
        after, idle = _threads(served["processes"]), _idle_seconds() - idle
        pushed = [writer.result() for writer in fleet.writers]
        for process in fleet.all:
            process.call("close")
    rate = sum(each["experiences"] / each["seconds"] for each in pushed)
    client = sum(each["cpu_seconds"] / each["seconds"] for each in pushed)
    micro = 1e6 / rate if rate else 0.0
    used = {place: (after[place] - before.get(place, 0.0)) / seconds * micro for place in after}
    return Split(
        rate=rate,
        client=client * micro,
        event_loop=used["server", True],
        grpc_threads=used["server", False],
        store_commit=used["writer", True],
        store_receive=used["writer", False],
        idle=idle / seconds / (os.cpu_count() or 1),
    )


def _threads(processes: dict[str, int]) -> dict[tuple[str, bool], float]:
    """CPU seconds so far, by process and whether it is its main thread."""
    used: dict[tuple[str, bool], float] = {}
    for name, pid in processes.items():
        for is_main, seconds in _of_process(pid):
            used[name, is_main] = used.get((name, is_main), 0.0) + seconds
    return used


def _of_process(pid: int) -> Iterator[tuple[bool, float]]:
    yield False, 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        yield int(task.name) == pid, (int(fields[11]) + int(fields[12])) / _TICKS


def _idle_seconds() -> float:
    """Of all cores, since the machine's start; waiting for the disk included."""
    fields = Path("/proc/stat").read_text().split()
    return (int(fields[4]) + int(fields[5])) / _TICKS


if __name__ == "__main__":
    main()
