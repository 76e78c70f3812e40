"""A run of the demo from its first line to its last: what it makes, says, leaves and cleans up."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from examples.demo import processes
from examples.demo.display import Display
from examples.demo.processes import DemoError
from examples.demo.report import introduction, invitation, problems, summary, verdict
from examples.demo.runner import Outcome, Runner
from examples.demo.server import Server, ServerError
from examples.demo.settings import DemoSettings


def play(
    *,
    output: Path,
    num_updates: int,
    seed: int,
    port: int,
    kills: bool,
    keeps: bool,
    draws: bool,
) -> int:
    """Run the demo; the exit status. An interrupted one leaves no process and no file.

    Args:
        output: Folder of the picture and of this run's files; made if need be.
        num_updates: Policy updates at most.
        seed: Of everything that is drawn by lot.
        port: Of the server; 0: a free one.
        kills: Whether the server and the trainer are killed on the way.
        keeps: Whether the server goes on until Ctrl-C.
        draws: Whether there is a picture.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=output))
    except OSError as error:
        return _fail(f"can't write to {output}: {error.strerror}; name another with --output")
    try:
        server = Server(folder, port=port)
    except ServerError as error:
        folder.rmdir()
        return _fail(str(error))
    settings = DemoSettings(
        address=server.address, folder=folder, seed=seed, num_updates=num_updates
    )
    for line in introduction(settings, server, kills=kills):
        print(line, flush=True)
    try:
        return _play(settings, server, kills=kills, keeps=keeps, draws=draws)
    except (DemoError, ServerError) as error:
        return _fail(f"{error}; the files of this run are in {folder}")
    except (KeyboardInterrupt, SystemExit):
        server.kill()
        shutil.rmtree(folder)
        raise
    finally:
        server.kill()


def _play(settings: DemoSettings, server: Server, *, kills: bool, keeps: bool, draws: bool) -> int:
    processes.prepare()
    with Display(settings) as display:
        outcome = Runner(settings, server, kills=kills).run(display)
    for line in summary(outcome):
        print(line)
    if draws:
        print(f"{'picture':<13}{_draw(outcome)}")
    print(verdict(outcome))
    if keeps:
        _keep(server)
    server.stop()
    if problems(outcome):
        print(f"journals, weights, and the server's log and store: {settings.folder}")
        return 1
    if not keeps:
        shutil.rmtree(settings.folder)
    return 0


def _draw(outcome: Outcome) -> Path:
    # matplotlib takes a second to import, and may be missing.
    from examples.demo.plot import write_plot

    path = outcome.settings.folder.parent / "demo.png"
    write_plot(outcome.history, path, settings=outcome.settings)
    return path


def _keep(server: Server) -> None:
    """Say what can be done with the server, and wait until Ctrl-C or until it ends."""
    for line in invitation(server):
        print(line, flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        print("\nstopping the server")
    print(f"its store stays: make run ARGS='--data {server.data}' serves it again")


def _fail(sentence: str) -> int:
    print(f"demo: {sentence}", file=sys.stderr)
    return 1
