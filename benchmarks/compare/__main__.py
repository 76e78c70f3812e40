"""`python -m benchmarks.compare`: measure all systems in turns, then print and draw what came out.

Raw figures go to `raw.jsonl` in the results folder; `python -m benchmarks.compare.report FOLDER`
makes the tables and the plot from them, now or later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from benchmarks.compare import limits, report
from benchmarks.compare.plan import NUM_WRITERS, QUICK, SYSTEMS, Plan, System
from benchmarks.compare.processes import Fleet, WorkerError, interpreter
from benchmarks.compare.rounds import Round
from benchmarks.workload import IMAGE, SIZES


def main() -> None:
    """Measure, keep the raw figures, report."""
    plan, folder = _options()
    folder.mkdir(parents=True, exist_ok=True)
    systems = [system for system in SYSTEMS if system.name in plan.systems]
    for system in [system for system in systems if interpreter(system.adapter) is None]:
        print(f"{system.name} is left out: it isn't set up (make bench-setup)")
        systems.remove(system)
    started = time.monotonic()
    with (folder / "raw.jsonl").open("w") as raw, ExitStack() as stack:
        fleets = _fleets(systems, folder, stack)
        _write(raw, _header(fleets))
        for repetition in range(plan.repetitions):
            for record in limits.measure():
                _write(raw, {"repetition": repetition, **record})
            for record in _repetition(plan, systems, fleets, repetition):
                _write(raw, {"repetition": repetition, **record})
    print(f"\n{time.monotonic() - started:.0f} s; raw figures in {folder / 'raw.jsonl'}\n")
    report.make(folder)


def _options() -> tuple[Plan, Path]:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--quick", action="store_true", help="a look: short windows, S and M, once")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--seconds", type=float, help="of each window of time")
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--systems", nargs="+", choices=names)
    parser.add_argument("--no-images", action="store_true", help="leave out multimodal experiences")
    parser.add_argument("--output", type=Path, default=Path("bench-output/compare"))
    options = parser.parse_args()
    given = {
        "repetitions": options.repetitions,
        "window_seconds": options.seconds,
        "sizes": options.sizes,
        "systems": options.systems,
        "images": False if options.no_images else None,
    }
    plan = QUICK if options.quick else Plan()
    return replace(plan, **{k: v for k, v in given.items() if v is not None}), options.output


def _fleets(systems: list[System], folder: Path, stack: ExitStack) -> dict[str, Fleet]:
    """Start the processes of all systems, one fleet per adapter."""
    fleets: dict[str, Fleet] = {}
    for system in systems:
        if system.adapter not in fleets:
            fleets[system.adapter] = fleet = Fleet(system.adapter, NUM_WRITERS, folder)
            stack.callback(fleet.end)
            # One after the other: imports of fifteen processes at once take longer than in turns.
            for process in fleet.all:
                process.versions()
    return fleets


def _repetition(
    plan: Plan, systems: list[System], fleets: dict[str, Fleet], repetition: int
) -> Iterator[dict[str, Any]]:
    """Every system at every size, by turns; who begins changes."""
    sizes = [*plan.sizes, *([IMAGE.name] if plan.images else [])]
    turn = repetition % len(systems)
    for size in sizes:
        for system in systems[turn:] + systems[:turn]:
            if size == IMAGE.name and not system.images:
                continue
            if size != IMAGE.name and not system.writes:
                continue
            load = os.getloadavg()[0]
            try:
                for record in Round(system, fleets[system.adapter], size, plan).run():
                    yield {**record, "load": load}
            except WorkerError as error:
                # The others' figures are worth having; this one's processes start anew.
                yield {"system": system.name, "size": size, "case": "error", "text": str(error)}
                fleets[system.adapter].renew()


def _header(fleets: dict[str, Fleet]) -> dict[str, Any]:
    versions: dict[str, str] = {"Python": platform.python_version()}
    for fleet in fleets.values():
        versions |= fleet.host.versions()
    return {
        "system": "machine",
        "case": "header",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions,
        "load": os.getloadavg(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write(raw: TextIO, record: dict[str, Any]) -> None:
    raw.write(json.dumps(record) + "\n")
    raw.flush()
    if record["case"] == "error":
        print(f"{record['system']} {record['size']} FAILED: {record['text']}", flush=True)
    if "rate" in record:
        name = "{repetition} {size:5} {system:14} {case:13} {mode:7}".format(**record)
        used = "  ".join(f"{key} {value:.0f}" for key, value in record["cpu_us"].items())
        print(f"{name} {record['rate']:10,.0f}/s   CPU us: {used}", flush=True)


if __name__ == "__main__":
    main()
