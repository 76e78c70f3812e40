"""What commands print: tables, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

_MOST_CHARS = 20_000


def show(table: Table) -> None:
    """Print a table; into a file or a pipe its lines go whole."""
    from experience_buffer_server.commands import terminal

    terminal.console().print(table)


def failed(message: str, *, status: int) -> SystemExit:
    """Say what went wrong in one line; what to raise then."""
    from experience_buffer_server.commands import terminal

    shown = terminal.clean(message, most_chars=_MOST_CHARS, lines=True)
    typer.echo(f"experience-buffer: {shown}", err=True)
    return SystemExit(status)


@contextmanager
def reported(*, status: int, also: type[Exception] | None = None) -> Iterator[None]:
    """End with a status, and one line, where it fails for a reason that users can see to.

    Args:
        status: The exit status then.
        also: Errors of this class, too.
    """
    # What knows of settings and stores is imported where a command needs it: here it would be
    # half of the time to any command's first line.
    from pydantic import ValidationError

    from experience_buffer.errors import ExperienceBufferError
    from experience_buffer_server.settings.server import ConfigurationError, explain
    from experience_buffer_server.store.interface import StoreError

    expected: tuple[type[Exception], ...] = (ConfigurationError, ExperienceBufferError, StoreError)
    expected += (also,) if also else ()
    try:
        yield
    except ValidationError as error:
        raise failed(explain(error), status=status) from error
    except expected as error:
        raise failed(str(error), status=status) from error
