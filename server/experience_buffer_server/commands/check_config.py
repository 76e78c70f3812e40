"""`experience-buffer check-config FILE`: would a server start with these settings?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands.looking import AsJson

if TYPE_CHECKING:
    from experience_buffer_server.settings.server import Settings


def check_config(
    file: Annotated[Path, typer.Argument(help="A TOML file of settings.")],
    as_json: AsJson = False,
) -> None:
    """Check settings as a server would at its start, without starting one; the environment counts, too.

    Says everything that is wrong at once, by key, with what would do. With --json: the settings as they
    hold, defaults included; what is wrong is on stderr, a line for each.

    Exit status 0: it can be used; 1: it can't; 2: there is no such file.
    """
    from experience_buffer_server.commands.output import failed

    if not file.is_file():
        raise failed(f"there is no file {file}", status=2)
    settings, problems = checked(file)
    if settings is None or problems:
        for key, message in problems:
            _say(key, message, as_json=as_json)
        raise SystemExit(1)
    if as_json:
        typer.echo(settings.model_dump_json())
        return
    names = ", ".join(settings.buffers) or "none"
    typer.echo(f"{file}: can be used; buffers: {names}")


def checked(file: Path) -> tuple[Settings | None, list[tuple[str, str]]]:
    """The settings of a file, and what is wrong with them: key, and what would do."""
    from pydantic import ValidationError

    from experience_buffer_server.settings.server import (
        ConfigurationError,
        Settings,
        load_settings,
        problems,
    )

    try:
        settings = load_settings(file)
    except ConfigurationError as error:
        if isinstance(cause := error.__cause__, ValidationError):
            return None, list(problems(cause, of=Settings))
        return None, [_parted(str(error))]
    return settings, [_parted(text) for text in _at_start(settings)]


def _at_start(settings: Settings) -> Iterator[str]:
    """What a server would find at its start: addresses open to everybody, files that can't be read."""
    from experience_buffer_server.access.entrance import Entrance, check_exposure
    from experience_buffer_server.runtime.metrics import Metrics
    from experience_buffer_server.settings.server import ConfigurationError

    try:
        check_exposure(settings)
    except ConfigurationError as error:
        yield str(error)
    try:
        Entrance(settings, Metrics())
    except ConfigurationError as error:
        yield str(error)


def _parted(text: str) -> tuple[str, str]:
    """A message that begins with its key, as two."""
    key, colon, message = text.partition(": ")
    return (key, message) if colon else ("configuration", text)


def _say(key: str, message: str, *, as_json: bool) -> None:
    from experience_buffer_server.commands.terminal import clean

    if as_json:
        line = {"error": {"type": "ConfigurationError", "key": key, "message": message}}
        sys.stderr.write(json.dumps(line) + "\n")
        return
    typer.echo(f"{clean(key, most_chars=1000)}: {clean(message, most_chars=4000)}", err=True)
