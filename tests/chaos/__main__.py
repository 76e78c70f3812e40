"""The crash matrix: `python -m tests.chaos [--kills 200] [--seed N] [--sabotage nosync|early-ack]`.

The exit status is 0 where nothing was lost, nothing came back and nothing was in two hands, else 1.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tests.chaos.epoch import run
from tests.chaos.points import Point, matrix, schedule, unreached
from tests.chaos.report import Report
from tests.faults.full_disk import check_small_disk
from tests.faults.shim import build

_FULL_KILLS = 200
"""A run of at least so many goes through all points, and is to reach each kind of them."""
_SHOWN = 3
"""Problems of one kind that are printed in full."""


def main() -> int:
    options = _parse()
    chance = random.Random(options.seed)
    points = schedule(options.kills, chance)
    if options.point:
        known = [one for one in matrix() if options.point in one.name]
        points = [known[number % len(known)] for number in range(options.kills)]
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.folder))
    library = build(folder)
    _say(f"{options.kills} kills, seed {options.seed}, files in {folder}")
    began = time.monotonic()
    report = run(
        points,
        folder=folder,
        library=library,
        seed=options.seed,
        epoch_kills=options.epoch_kills,
        sabotage=options.sabotage,
        say=_say,
    )
    if options.kills >= _FULL_KILLS and not (options.sabotage or options.point):
        judge_reach(points, report)
    _tell(report)
    if not (options.sabotage or options.point):
        try:
            _say(f"a disk that fills: {check_small_disk(folder)}")
        except AssertionError as error:
            report.problems.append(str(error))
            _say(f"a disk that fills: {error}")
    if not report.problems:
        shutil.rmtree(folder)
    _say(f"{time.monotonic() - began:.0f} s; repeat it with --seed {options.seed}")
    return 1 if report.problems else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="lives of servers that end")
    parser.add_argument("--epoch-kills", type=int, default=50, help="kills per store")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--sabotage", choices=["", "nosync", "early-ack"], default="")
    parser.add_argument("--point", default="", help="only points whose name holds this")
    parser.add_argument("--folder", help="where the files go; the system's temporary one")
    return parser.parse_args()


def judge_reach(points: Sequence[Point], report: Report) -> None:
    """Say which kinds of points never came; that none of a whole group did is a problem."""
    kinds, groups = unreached(points, +report.points)
    if kinds:
        _say(f"\n*** NEVER REACHED, so nothing is known of: {', '.join(kinds)} ***")
    report.problems += [f"no process died at any of the {name}" for name in groups]


def _tell(report: Report) -> None:
    _say(f"\nkills: {sum(report.kills.values())} of servers")
    for name, count in sorted(report.kills.items()):
        _say(f"  {count:6} {name}")
    for name, count in sorted(report.client_kills.items()):
        _say(f"  {count:6} {name}s beside them")
    _say("by point:")
    for name, count in sorted(report.points.items()):
        _say(f"  {count:6} {name}")
    missed = {name: count for name, count in report.missed.items() if count}
    if missed:
        _say(f"not reached, died at a random moment instead: {missed}")
    lost = ", ".join(f"{count} of {name}" for name, count in sorted(report.lost_sectors.items()))
    _say(f"compared (sectors lost with the power: {lost or 'none'}):")
    for one in fields(report.counts):
        _say(f"  {getattr(report.counts, one.name):6} {one.name.replace('_', ' ')}")
    _say(f"problems: {len(report.problems)}")
    alike: dict[str, list[str]] = {}
    for problem in report.problems:
        alike.setdefault(re.sub(r"[0-9]+[0-9a-f/.]*", "0", problem), []).append(problem)
    for problems in alike.values():
        for problem in problems[:_SHOWN]:
            _say(f"  {problem}")
        if len(problems) > _SHOWN:
            _say(f"  ... and {len(problems) - _SHOWN} like it")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
