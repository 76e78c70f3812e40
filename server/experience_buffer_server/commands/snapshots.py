"""`experience-buffer snapshot | snapshots | restore`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands import connection
from experience_buffer_server.commands.output import failed, reported, show

if TYPE_CHECKING:
    from experience_buffer_server.store.lmdb.snapshots.manifest import Manifest

Data = Annotated[Path | None, typer.Option(help="Folder of a store; a server may be using it.")]
Label = Annotated[str, typer.Option(help="Ends the name: letters, digits, '.', '_', '-'.")]
_SERVER_OPTIONS = ("timeout", *connection.OPTIONS)


def take(
    context: typer.Context,
    address: connection.Address = connection.DEFAULT_ADDRESS,
    data: Data = None,
    to: Annotated[Path | None, typer.Option(help="With --data: folder of the snapshots.")] = None,
    label: Label = "",
    keep: Annotated[int, typer.Option(min=0, help="With --to: how many stay; 0: all.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a server.")] = 3600.0,
    ca: connection.Ca = None,
    certificate: connection.Certificate = None,
    key: connection.Key = None,
    server_name: connection.ServerName = "",
    token_file: connection.TokenFile = None,
) -> None:
    """Take a snapshot: ask a running server for one, or read a store with --data and --to."""
    if (data is None) != (to is None):
        raise typer.BadParameter("--data and --to belong together")
    if keep and to is None:
        raise typer.BadParameter(
            "--keep goes with --data and --to; what a server keeps its own setting says, snapshots.keep"
        )
    if to is not None and (given := _server_options(context)):
        raise typer.BadParameter(
            f"{' and '.join(given)} would be for a server, and with --data and --to none is asked"
        )
    with reported(status=1):
        if data is not None and to is not None:
            _take_here(data, to, label, keep)
            return
        options = connection.Connection(
            address=address,
            ca=ca,
            certificate=certificate,
            key=key,
            server_name=server_name,
            token_file=token_file,
        )
        with options.client(timeout=timeout) as client:
            taken = client.snapshot(label, timeout=timeout)
        _say_taken(taken.name, taken.num_experiences, taken.num_bytes, taken.seconds, taken.removed)


def _server_options(context: typer.Context) -> list[str]:
    """Those that were given."""
    sources = {name: context.get_parameter_source(name) for name in _SERVER_OPTIONS}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def list_all(
    folder: Annotated[Path, typer.Argument(help="Folder of snapshots.")],
) -> None:
    """List the snapshots in a folder, newest last."""
    from experience_buffer_server.commands import terminal
    from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
    from experience_buffer_server.store.lmdb.snapshots.manifest import utc_now

    if not folder.is_dir():
        raise failed(f"there is no folder {folder}", status=1)
    rows: list[tuple[str, ...]] = []
    now = utc_now()
    for snapshot in SnapshotFolder(folder).snapshots():
        manifest = snapshot.manifest
        if manifest is None:
            rows.append((snapshot.name, "", "", "", "", f"no: {snapshot.problem}"))
            continue
        rows.append(
            (
                *(snapshot.name, _age(manifest.create_time, now), _size(manifest.num_bytes)),
                *(f"{manifest.num_experiences:,}", _steps(manifest) or "none"),
                f"no: {snapshot.problem}" if snapshot.problem else "yes",
            )
        )
    # A name is there to be copied, whatever the width.
    show(terminal.table("!name", "age", "size", "experiences", "steps", "whole", rows=rows))


def restore(
    snapshot: Annotated[Path, typer.Argument(help="A snapshot's folder.")],
    data: Annotated[Path, typer.Option(help="The store's folder: empty, or not there yet.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every row, too.")] = False,
) -> None:
    """Make a store from a snapshot, for `serve --data`."""
    from experience_buffer_server.store.lmdb.snapshots import restore as snapshot_restore

    with reported(status=1), _progress() as on_progress:
        manifest = snapshot_restore.restore(snapshot, data, verify=verify, on_progress=on_progress)
    typer.echo(
        f"restored {snapshot.name} to {data}: {manifest.num_experiences} experiences in "
        f"{len(manifest.buffers)} buffers"
    )
    if steps := _steps(manifest):
        typer.echo(f"trainers go on from these training steps: {steps}")


def _take_here(data: Path, to: Path, label: str, keep: int) -> None:
    import asyncio

    from experience_buffer_server.store.lmdb.snapshots import snapshots
    from experience_buffer_server.store.lmdb.snapshots.folder import LABEL

    if label and LABEL.fullmatch(label) is None:
        raise typer.BadParameter(
            "--label: give 1 to 64 letters, digits, '.', '_' and '-'", param_hint=""
        )
    answer = asyncio.run(snapshots.run_copy(data, to, label=label, keep=keep))
    snapshots.raise_for(answer)
    _say_taken(
        answer.name, answer.num_experiences, answer.num_bytes, answer.seconds, answer.removed
    )
    if answer.message:
        typer.echo(f"warning: {answer.message}", err=True)


def _say_taken(
    name: str, num_experiences: int, num_bytes: int, seconds: float, removed: object
) -> None:
    typer.echo(f"{name}: {num_experiences} experiences, {_size(num_bytes)}, {seconds:.1f} s")
    if isinstance(removed, list | tuple) and removed:
        typer.echo(f"removed {', '.join(removed)}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("restoring", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _age(time: datetime, now: datetime) -> str:
    seconds = (now - time).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _steps(manifest: Manifest) -> str:
    """Each trainer's last training step: "math/trainer 12"."""
    return ", ".join(
        f"{buffer.name}/{consumer.name} {consumer.last_step}"
        for buffer in manifest.buffers
        for consumer in buffer.consumers
        if consumer.last_step is not None
    )
