"""`make fuzz`: every target explored and endured, one process at a time, and a table of what came.

`python -m tests.fuzz [TARGET ...] [--runs N] [--explore N] [--seed S] [--keep]`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.fuzz import corpus
from tests.fuzz.decoders import MUTATIONS
from tests.fuzz.findings import Report

ROOT: Final = Path(__file__).parents[2]
_EDGES: Final = re.compile(r"cov: (\d+)")


def main() -> int:
    """Run the targets; 1 if anything was found."""
    asked = _arguments()
    # Into a file, too, the figures are to be read.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    if importlib.util.find_spec("atheris") is None and asked.explore:
        console.print("atheris isn't installed: inputs are mutated without regard to coverage")
        asked.explore = 0
    reports: dict[str, Report] = {}
    for number, target in enumerate(asked.targets):
        seed = asked.seed + number
        console.print(f"{target}: seed {seed}")
        with tempfile.TemporaryDirectory(prefix=f"fuzz-{target}-") as folder:
            reports[target] = _run(target, Path(folder), asked, seed)
    console.print(_table(reports))
    findings = [(t, place, text) for t, r in reports.items() for place, text in r.findings.items()]
    for target, place, text in findings:
        console.print(f"{target}: {place}: {text}", style="red", markup=False)
    if findings:
        console.print(f"The inputs are in {corpus.REGRESSIONS.relative_to(ROOT)}.")
    return 1 if findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(MUTATIONS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of each target")
    parser.add_argument("--explore", type=int, default=30_000, help="inputs guided by coverage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep new inputs in tests/data/fuzz")
    asked = parser.parse_args()
    unknown = sorted(set(asked.targets) - set(MUTATIONS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(MUTATIONS)}")
    asked.targets = asked.targets or list(MUTATIONS)
    return asked


def _run(target: str, folder: Path, asked: argparse.Namespace, seed: int) -> Report:
    """Explore one target, then endure it with what was found."""
    inputs = folder / "corpus"
    inputs.mkdir()
    first = corpus.seeds(target) + corpus.kept(target) + corpus.regressions(target)
    for number, data in enumerate(first):
        (inputs / f"first-{number:05}").write_bytes(data)
    explored, log = Report(), ""
    if asked.explore:
        explored, log = _process("explore", target, folder, asked.explore, seed)
        if asked.keep:
            fresh = {path.read_bytes() for path in inputs.iterdir()} - set(first)
            corpus.keep(target, [*corpus.kept(target), *fresh])
    endured, _ = _process("endure", target, folder, asked.runs, seed)
    endured.num_edges = max((int(edges) for edges in _EDGES.findall(log)), default=0)
    endured.num_kept = len(list(inputs.iterdir()))
    endured.findings = explored.findings | endured.findings
    return endured


def _process(what: str, target: str, folder: Path, runs: int, seed: int) -> tuple[Report, str]:
    """Run one phase in a process of its own; what it reports, and what it wrote."""
    command = [sys.executable, "-m", f"tests.fuzz.{what}", target, "--folder", str(folder)]
    command += ["--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    path = folder / f"{what}.json"
    report = Report(**json.loads(path.read_text("utf-8"))) if path.exists() else Report()
    for hang in folder.glob("hang-*"):
        report.findings["a hang"] = corpus.save_finding(target, hang.read_bytes()).name
    if done.returncode:
        report.findings[f"the process of {what} ended with {done.returncode}"] = done.stderr[-2000:]
    return report, done.stderr


def _table(reports: dict[str, Report]) -> Table:
    table = Table()
    for title in ("target", "inputs", "seconds", "edges", "corpus", "slowest ms", "most MiB"):
        table.add_column(title, justify="left" if title == "target" else "right")
    table.add_column("findings", justify="right")
    for target, report in reports.items():
        table.add_row(
            target,
            f"{report.num_inputs:,}",
            f"{report.seconds:.0f}",
            f"{report.num_edges:,}",
            f"{report.num_kept:,}",
            f"{1000 * report.slowest_seconds:.1f}",
            f"{report.largest_bytes / 2**20:.1f}",
            str(len(report.findings)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
