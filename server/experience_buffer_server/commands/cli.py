"""The command line: `experience-buffer serve | status | top | why | groups | show | ...`.

Each command is a function in a module of its family; the table here names it. Only the module of the
command that is called is imported: importing and declaring all of them takes longer than most of them run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from experience_buffer_server import __version__

PANELS: Final[dict[str, dict[str, str]]] = {
    "Serve": {
        "serve": "serving:serve",
        "health": "serving:health",
        "token": "tokens:app",
        "compile": "compiling:compile_all",
        "version": "cli:print_version",
    },
    "Look": {
        "status": "status:status",
        "top": "top:top",
        "why": "status:why",
        "buffers": "buffers:buffers",
        "groups": "groups:groups",
        "leases": "leases:leases",
        "list": "experiences:list_all",
        "show": "show:show",
        "tail": "experiences:tail",
        "steps": "steps:steps",
        "departures": "steps:departures",
    },
    "Act": {
        "seal": "acting:seal",
        "drop": "acting:drop",
        "delete": "acting:delete",
        "release": "acting:release",
    },
    "Data": {
        "snapshot": "snapshots:take",
        "snapshots": "snapshots:list_all",
        "restore": "snapshots:restore",
        "export": "exports:export",
        "import": "imports:import_files",
        "replay-bundle": "replays:bundle",
        "replay": "replays:replay",
    },
    "Check": {
        "check-config": "check_config:check_config",
        "verify": "verify:verify",
        "bench": "bench:bench",
    },
}
"""By panel of the help, in its order: each command's name, with the module and function that run it."""


def application(only: str = "") -> typer.Typer:
    """Declare the command line.

    Args:
        only: Only this command; empty: all.
    """
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, callback=everything)
    for panel, commands in PANELS.items():
        for name, where in commands.items():
            if only not in ("", name):
                continue
            module, _, attribute = where.partition(":")
            found = getattr(import_module(f"{__package__}.{module}"), attribute)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(found)
    return app


def names() -> Iterator[str]:
    """The names of all commands."""
    for commands in PANELS.values():
        yield from commands


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def everything(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """The experience buffer server, and what looks into it."""


def print_version() -> None:
    """Print the version."""
    _print_version(asked=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Those of the process by default.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    named = given[0] if given and given[0] in names() else ""
    application(named)(given, prog_name="experience-buffer")
