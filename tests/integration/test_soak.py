"""A short soak, and that each line of its verdict can fail."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from tests.soak.audit import timeline
from tests.soak.chores import CHORES
from tests.soak.plot import write_plot
from tests.soak.run import soak, write_lines
from tests.soak.verdict import Call, Limits, judge, percentile, theil_sen
from tests.soak.watch import Process, Sample

SECONDS = 12.0
LOOSE = Limits(
    # So soon after the start memory and latency still move, and other tests may run beside.
    memory_per_minute=120e6,
    num_descriptors=6,
    file_growth=64 << 20,
    latency_ratio=50.0,
)


@pytest.mark.timeout(240)
def test_a_short_soak(tmp_path: Path) -> None:
    outcome = soak(tmp_path, seconds=SECONDS, limits=LOOSE)
    failed = [f"{line.what}: {line.found}" for line in outcome.lines if not line.ok]
    assert not failed
    assert len(outcome.lines) == 16
    assert outcome.kills, "nobody was killed"
    assert {chore.name for chore in CHORES} == outcome.chores.keys()
    assert outcome.audit.num_acked > 500
    assert outcome.audit.num_trained > 100
    assert outcome.audit.num_evicted > 0
    write_lines(outcome, tmp_path / "soak.jsonl")
    assert len((tmp_path / "soak.jsonl").read_text().splitlines()) > SECONDS / 2
    write_plot(outcome, tmp_path / "soak.png", title="A short soak")
    assert (tmp_path / "soak.png").stat().st_size > 20_000


# --- the verdict


def samples(**growth: float) -> list[Sample]:
    """One a second: flat but for what grows, by so much a minute."""
    memory, descriptors, threads, file = (
        growth.get(name, 0.0) / 60 for name in ("memory", "descriptors", "threads", "file")
    )
    return [
        Sample(
            time=float(second),
            processes={
                name: Process(
                    # Up and down by 2 MB, as if garbage came and went.
                    memory_bytes=int(5e7 + 2e6 * math.sin(second) + second * memory),
                    num_descriptors=int(30 + second * descriptors),
                    num_threads=int(9 + second * threads),
                )
                for name in ("server", "writer", "compute")
            },
            file_bytes=int((64 << 20) + second * file),
            payload_bytes=1000,
            depths={},
            oldest_open_seconds=0.0,
            slowest_fsync_seconds=0.002,
        )
        for second in range(240)
    ]


def calls(first: float, last: float) -> list[Call]:
    """Ten a second of each kind; one in fifty takes longer: so much at first, so much at last."""
    return [
        Call(
            kind=kind,
            time=number / 10,
            seconds=(first if number < 1200 else last) if number % 50 == 0 else 0.001,
        )
        for kind in ("push", "sample", "ack")
        for number in range(2400)
    ]


def failures(seen: list[Sample], timed: list[Call]) -> set[str]:
    lines = judge(seen, timed, begin=48.0, end=240.0, window=60.0, limits=Limits())
    return {line.what for line in lines if not line.ok}


def test_what_is_flat_passes() -> None:
    assert failures(samples(), calls(0.02, 0.029)) == set()
    assert failures(samples(memory=0.9e6), calls(0.02, 0.01)) == set()


@pytest.mark.parametrize(
    ("growth", "failed"),
    [
        ({"memory": 1.2e6}, "memory per minute"),
        ({"descriptors": 2.0}, "descriptors"),
        ({"threads": 2.0}, "threads"),
    ],
)
def test_what_grows_fails(growth: dict[str, float], failed: str) -> None:
    expected = {f"{name}: {failed}" for name in ("server", "writer", "compute")}
    assert failures(samples(**growth), calls(0.02, 0.02)) == expected


def test_a_growing_file_and_slower_calls_fail() -> None:
    grown = samples(file=8 << 20)
    assert failures(grown, calls(0.02, 0.02)) == {"disk: growth of the store's file"}
    slower = {f"{kind}: p99 at the end over p99 at the start" for kind in ("push", "sample", "ack")}
    assert failures(samples(), calls(0.02, 0.031)) == slower
    assert failures(samples(), []) == slower, "calls that are never answered aren't fast"


def test_a_process_that_was_gone_fails() -> None:
    seen = samples()
    processes = {k: v for k, v in seen[100].processes.items() if k != "compute"}
    seen[100] = dataclasses.replace(seen[100], processes=processes)
    assert failures(seen, calls(0.02, 0.02)) == {"compute: alive"}


def test_the_slope_is_robust_and_percentiles_are_values() -> None:
    line = [(float(x), 3.0 * x + 7.0) for x in range(20)]
    assert theil_sen(line) == pytest.approx(3.0)
    assert theil_sen([*line[:18], (18.0, 1e9), (19.0, -1e9)]) == pytest.approx(3.0)
    assert theil_sen(line[:1]) == 0.0
    assert percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert percentile(list(map(float, range(1, 101))), 99) == 99.0
    assert math.isnan(percentile([], 99))


def test_a_timeline_leaves_out_what_was_gone_back_behind() -> None:
    trained = [{"event": "trained", "step": step, "uids": [f"u{step}"]} for step in (1, 2, 3)]
    again = [{"event": "resumed", "step": 1}, {"event": "trained", "step": 2, "uids": ["u9"]}]
    assert timeline(trained) == ["u1", "u2", "u3"]
    assert timeline([*trained, *again]) == ["u1", "u9"]
