"""`experience-buffer bench`: how fast a server is from here, by a short load that is bounded."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands import connection
from experience_buffer_server.commands.looking import Looking, Yes, looks

if TYPE_CHECKING:
    from experience_buffer import Client
    from experience_buffer_server.commands.bench_load import Load, Measured


@looks
def bench(
    look: Looking,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long.")] = 5.0,
    tokens: Annotated[int, typer.Option(min=1, max=32_768, help="Tokens of each response.")] = 512,
    group_size: Annotated[int, typer.Option(min=1, max=64, help="Members of a group.")] = 8,
    batch: Annotated[
        int, typer.Option(min=1, max=64, help="Groups in a push, and in a batch.")
    ] = 8,
    workers: Annotated[int, typer.Option(min=1, max=8, help="Who push at once.")] = 2,
    temporary: Annotated[
        bool, typer.Option("--temporary", help="A server of its own, on this machine's disk.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Measure pushes and batches per second and how long calls take: workers push, a trainer trains.

    It writes into a buffer of its own, which it removes; a server that is in use notices the load.
    Figures are of this machine and this client: `make bench` measures a server by many.
    """
    from experience_buffer_server.commands.bench_load import Load

    name = f"bench-{secrets.token_hex(4)}"
    load = Load(name, seconds, tokens=tokens, group_size=group_size, batch=batch, workers=workers)
    if temporary:
        with temporary_server() as address:
            reach = connection.Connection(address=address)
            with reach.client(timeout=60.0) as client:
                _say(look, load, _run(client, load))
        return
    look.confirm(
        f"This pushes to {look.options.address} for {seconds:g} s as fast as it takes it, into a "
        f"buffer of its own, {name}, and removes that: whoever uses the server will notice.",
        yes=yes,
    )
    look.timeout = max(look.timeout, 60.0)
    _say(look, load, _run(look.client, load))


def _run(client: Client, load: Load) -> Measured:
    try:
        return load.run(client)
    finally:
        client.delete_buffer(load.buffer, force=True)


def _say(look: Looking, load: Load, measured: Measured) -> None:
    if look.as_json:
        look.json([measured])
        return
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import table

    look.say(
        table(
            "!what", ">calls", ">experiences/s", ">MB/s", ">p50 ms", ">p90 ms", ">p99 ms", ">max ms",
            rows=[
                (
                    *(each.what, each.calls, f"{each.experiences_per_second:,.0f}"),
                    f"{each.bytes_per_second / 1e6:,.1f}",
                    *(f"{each.milliseconds[name]:,.1f}" for name in ("p50", "p90", "p99", "max")),
                )
                for each in measured.calls
            ],
        )
    )  # fmt: skip
    look.say(
        f"{_show.counted(load.workers, 'worker')}, one trainer, {load.seconds:g} s; "
        f"{load.batch} groups of {load.group_size}, {load.tokens:,} response tokens each, "
        f"{_show.size(measured.payload_bytes)} an experience"
    )


@contextmanager
def temporary_server() -> Iterator[str]:
    """A server of its own on a free port, over a folder that goes with it; its address.

    Raises:
        typer.BadParameter: It doesn't start.
    """
    with tempfile.TemporaryDirectory(prefix="experience-buffer-bench-") as folder:
        command = [sys.executable, "-m", "experience_buffer_server", "serve"]
        command += ["--data", str(Path(folder) / "data"), "--port", "0", "--metrics-port", "-1"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
        with process:
            try:
                yield _address(process)
            finally:
                process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    """Where it listens, which a line of its log says."""
    assert process.stderr is not None
    line = ""
    for line in process.stderr:
        if line.startswith("{") and '"listening"' in line:
            return str(json.loads(line)["address"])
    raise typer.BadParameter(f"the server doesn't start: {line.strip()}", param_hint="--temporary")
