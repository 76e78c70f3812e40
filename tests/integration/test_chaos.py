"""The crash matrix in short: each kind of death once, and proof that a missing fsync is noticed.

The long one is `make chaos`; docs/durability.md says what both check.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.epoch import run
from tests.chaos.points import Point, matrix
from tests.chaos.report import Report
from tests.faults.shim import build

KINDS = [
    "rewind: after",
    "commit of append: answered",
    "random moment/compute",
    "commit of ack: after-sync",
    "eviction: after",
    "commit of advantages: before-sync",
    "random moment/both",
    "map growth: after",
    "commit of large-append: after-payload-sync",
    "ack-submitted: after",
    "retention-removal: before",
    "random moment/power",
]
"""A point of each kind, and every victim."""
LOSSES = (
    *("acknowledged, and lost", "never consumed it, and it is gone", "stored by a push after"),
    *("given twice", "is forgotten", "verify: ", "no buffer '"),
)
"""What the comparison and `verify` say where something was lost."""


def points(names: list[str]) -> list[Point]:
    known = {point.name: point for point in matrix()}
    known |= {f"{point.name}/{point.victim}": point for point in matrix()}
    return [known[name] for name in names]


def short_run(folder: Path, names: list[str], *, seed: int, sabotage: str = "") -> Report:
    return run(
        points(names),
        folder=folder,
        library=build(folder),
        seed=seed,
        epoch_kills=len(names),
        sabotage=sabotage,
    )


@pytest.mark.timeout(240)
def test_nothing_is_lost_and_nothing_comes_back(tmp_path: Path) -> None:
    report = short_run(tmp_path, KINDS, seed=1)
    assert not report.problems, "\n".join(report.problems)
    assert sum(report.kills.values()) == len(KINDS)
    assert set(report.kills) == {"server", "writer", "compute", "both", "power"}
    assert set(report.client_kills) == {"pusher", "trainer"}
    counts = report.counts
    assert min(counts.acked_experiences, counts.deliveries, counts.acks, counts.advantages) > 50
    assert min(counts.whole_groups, counts.repeated_pushes, counts.redeliveries) > 5
    assert counts.large_deliveries > 20


@pytest.mark.timeout(240)
def test_a_missing_fsync_is_noticed(tmp_path: Path) -> None:
    report = short_run(tmp_path, ["random moment/power"] * 4, seed=2, sabotage="nosync")
    assert report.lost_sectors["data.mdb"], "\n".join(report.problems)
    losses = [one for one in report.problems if any(loss in one for loss in LOSSES)]
    assert losses, "\n".join(report.problems)
