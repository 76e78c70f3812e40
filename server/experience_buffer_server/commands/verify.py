"""`experience-buffer verify`: is everything in a store as it was written?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from experience_buffer_server.commands.output import reported

if TYPE_CHECKING:
    from experience_buffer_server.store.lmdb.verify.report import Report

_SHOWN: Final = 20
"""Findings that are printed; `--json` has more."""


def verify(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the store.", show_default="as configured, else ./data"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare every row and payload of a store with its checksum, and rows with one another.

    It only reads, and a server may be serving the store meanwhile.

    Exit status 0: nothing is wrong; 1: something is; 2: the store can't be opened.
    """
    from experience_buffer_server.settings.server import load_settings

    with reported(status=2, also=OSError):
        report = _check(data or load_settings(None).store.path)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    raise SystemExit(0 if report.is_clean else 1)


def _check(path: Path) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from experience_buffer_server.store.interface import StoreError
    from experience_buffer_server.store.lmdb.verify.check import check

    if not (path / "data.mdb").exists():
        raise StoreError(f"there is no store at {path}: no data.mdb")
    console = Console(stderr=True)
    if not console.is_terminal:
        return check(path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        return check(
            path,
            on_progress=lambda table, rows, total: progress.update(
                task, description=table, completed=rows, total=total
            ),
        )


def _print(report: Report) -> None:
    for buffer in report.buffers:
        aside = f", {buffer.num_set_aside} set aside" if buffer.num_set_aside else ""
        number = buffer.num_departed
        departed = f", {number} on their way to the archive" if number else ""
        typer.echo(
            f"buffer {buffer.name}: {buffer.num_experiences} experiences of "
            f"{buffer.payload_bytes} bytes, {buffer.num_groups} groups, "
            f"{buffer.num_open_leases} open leases{aside}{departed}"
        )
    for finding in report.findings[:_SHOWN]:
        row = f" {finding.row}" if finding.row else ""
        typer.echo(
            f"{finding.kind}: {finding.table}, buffer {finding.buffer}{row}: {finding.message}"
        )
    num_findings = sum(report.totals.values())
    if num_findings > _SHOWN:
        typer.echo(f"... and {num_findings - _SHOWN} more; --json lists up to 1000")
    typer.echo(f"{report.num_rows} rows in {report.seconds:.1f} s: {_verdict(report)}")


def _verdict(report: Report) -> str:
    from experience_buffer_server.store.lmdb.verify.report import Kind

    kinds = ", ".join(
        f"{count} {kind}" for kind, count in sorted(report.totals.items()) if kind != Kind.LEFTOVER
    )
    if kinds:
        return kinds
    count = report.totals[Kind.LEFTOVER]
    return f"clean, {count} leftovers that the next start tidies up" if count else "clean"
