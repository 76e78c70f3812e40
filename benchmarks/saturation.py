"""What a push waits while advantages are computed without a pause: `make bench-saturation`.

Groups that wait for a field are stored first; changing their buffer's estimator to one that needs
no such field makes all of them ready at once. Pushes to another buffer are timed while those groups
are computed, and in turn while nothing is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.experiences import group
from benchmarks.servers import running_server
from benchmarks.workload import GROUP_SIZE, SIZES, Size
from experience_buffer import AdvantageConfig, BufferConfig, Client, Experience

_ESTIMATORS = ("grpo", "reinforce", "rloo", "opmd", "dr_grpo")
_TARGET = 1.5
_TURNS_PER_LOOK = 25
"""Looking costs the server a walk over all groups, and the next push its caches."""


def main() -> None:
    """Time pushes in both states, in turns; print their percentiles and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1500, help="groups computed per round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", choices=SIZES, default="M")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[options.size]
    idle, busy = Times(), Times()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder) / "data") as server,
        Client(server.address) as client,
    ):
        client.create_buffer("probe")
        probes = _probes(size)
        for number in range(options.rounds):
            estimator = _ESTIMATORS[number % len(_ESTIMATORS)]
            name = _load(client, size, number, options.groups)
            # Both states last equally long, so that drifts of the machine touch both.
            seconds, pushes = _computing(client, name, estimator, probes)
            busy.add(pushes)
            idle.add(_pushes(client, name, probes, seconds))
            rate = options.groups * GROUP_SIZE / seconds
            print(f"{estimator:20} {rate:8,.0f} experiences/s, {len(pushes)} turns", flush=True)
            client.delete_buffer(name, force=True)
    _report(options.size, idle, busy)


class Times:
    """Seconds of pushes: of one experience, and of a group."""

    def __init__(self) -> None:
        self.of_one: list[float] = []
        self.of_group: list[float] = []

    def add(self, turns: Sequence[tuple[float, float]]) -> None:
        """Note turns of one push each."""
        self.of_one += [one for one, _ in turns]
        self.of_group += [of_group for _, of_group in turns]


def _probes(size: Size) -> Iterator[list[Experience]]:
    number = 0
    while True:
        yield group(size, 1_000_000, number)
        number += 1


def _load(client: Client, size: Size, number: int, num_groups: int) -> str:
    """Store groups that lack a field."""
    name = f"load-{number}"
    client.create_buffer(
        BufferConfig(
            name=name,
            group_size=GROUP_SIZE,
            on_missing_field="wait",
            advantage=AdvantageConfig("gae"),
        )
    )
    with client.writer(buffer=name) as writer:
        for task in range(num_groups):
            writer.append(group(size, number, task))
    return name


def _computing(
    client: Client, name: str, estimator: str, probes: Iterator[list[Experience]]
) -> tuple[float, list[tuple[float, float]]]:
    """Push while the groups are computed; how long that took, and each push."""
    started = time.perf_counter()
    client.update_buffer(name, advantage=AdvantageConfig(estimator))
    pushes: list[tuple[float, float]] = []
    while _is_computing(client, name):
        pushes += [_turn(client, probes) for _ in range(_TURNS_PER_LOOK)]
    return time.perf_counter() - started, pushes


def _is_computing(client: Client, name: str) -> bool:
    (stats,) = client.get_stats(name).buffers
    return stats.num_computing_groups > 0


def _pushes(
    client: Client, name: str, probes: Iterator[list[Experience]], seconds: float
) -> list[tuple[float, float]]:
    """Push while nothing is computed; looking at the other buffer as often as while it is."""
    deadline = time.perf_counter() + seconds
    pushes: list[tuple[float, float]] = []
    while time.perf_counter() < deadline:
        pushes += [_turn(client, probes) for _ in range(_TURNS_PER_LOOK)]
        _is_computing(client, name)
    return pushes


def _turn(client: Client, probes: Iterator[list[Experience]]) -> tuple[float, float]:
    """Push one experience, then a group."""
    one = next(probes)[:1]
    return _push(client, one), _push(client, next(probes))


def _push(client: Client, experiences: Sequence[Experience]) -> float:
    started = time.perf_counter()
    client.push(experiences, buffer="probe")
    return time.perf_counter() - started


def _report(size: str, idle: Times, busy: Times) -> None:
    print(f"\nOne push ({size}), ms, with its encoding and its fsync; p99 ratio, target {_TARGET}")
    for name, before, after in (
        ("one experience", idle.of_one, busy.of_one),
        (f"a group of {GROUP_SIZE}", idle.of_group, busy.of_group),
    ):
        cuts = [statistics.quantiles(times, n=100) for times in (before, after)]
        for state, of_one in zip(("idle", "busy"), cuts, strict=True):
            p50, p90, p99 = (of_one[place] * 1e3 for place in (49, 89, 98))
            print(f"{name:15} {state}: p50 {p50:.2f}   p90 {p90:.2f}   p99 {p99:.2f}")
        ratio = cuts[1][98] / cuts[0][98]
        print(f"{name:15} p99 ratio {ratio:.2f}: {'met' if ratio <= _TARGET else 'missed'}")


if __name__ == "__main__":
    main()
