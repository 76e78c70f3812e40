"""`python -m tests.soak`: a server under mixed load for minutes; is everything flat?

Prints a table, writes soak.png and soak.jsonl, and ends with status 1 if a line of it fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.integration.server import Server
from tests.soak.plot import write_plot
from tests.soak.run import CONFIGURATION, Outcome, soak, write_lines

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load")
    parser.add_argument("--output", type=Path, default=Path("soak-output"))
    parser.add_argument("--data", type=Path, help="empty folder for the server; else a passing one")
    parser.add_argument("--seed", type=int, default=20, help="of who is killed when")
    parser.add_argument("--trace", action="store_true", help="write what grows to trace.txt")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    with tempfile.TemporaryDirectory() as passing:
        folder = options.data or Path(passing)
        outcome = soak(
            folder,
            server=_traced(folder, options.output) if options.trace else None,
            seconds=60 * options.minutes,
            seed=options.seed,
            say=console.print,
        )
    title = f"{options.minutes:g} minutes of mixed load, {len(outcome.kills)} clients killed"
    write_plot(outcome, options.output / "soak.png", title=title)
    write_lines(outcome, options.output / "soak.jsonl")
    _print(outcome, console)
    console.print(f"{options.output / 'soak.png'}, {options.output / 'soak.jsonl'}")
    return 0 if outcome.ok else 1


def _traced(folder: Path, output: Path) -> Server:
    """A server that writes down what its memory holds beyond what it did after the warm-up."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "SOAK_TRACE": str(output.resolve() / "trace.txt")}
    return Server(
        folder / "server",
        toml=CONFIGURATION,
        module="tests.soak.traced",
        compiled_reader=True,
        environment=environment,
    )


def _print(outcome: Outcome, console: Console) -> None:
    table = Table(title="Soak", title_justify="left")
    for name in ("", "found", "limit", ""):
        table.add_column(name, overflow="fold")
    for line in outcome.lines:
        table.add_row(line.what, line.found, line.limit, "ok" if line.ok else "[red]FAILED")
    console.print(table)
    seconds = outcome.end - outcome.start
    found = outcome.audit
    fsync = sorted(sample.slowest_fsync_seconds for sample in outcome.watch.samples)
    console.print(
        f"{found.num_acked:,} experiences pushed in {seconds:.0f} s, {found.num_trained:,} of the "
        f"queue trained on once, {found.num_evicted:,} evicted; {len(outcome.calls):,} timed calls; "
        f"{len(outcome.kills)} clients killed"
    )
    console.print(", ".join(f"{name}: {count}" for name, count in sorted(outcome.chores.items())))
    console.print(
        f"bare fsync beside it, slowest of each second: median {1e3 * fsync[len(fsync) // 2]:.1f}, "
        f"worst {1e3 * fsync[-1]:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
