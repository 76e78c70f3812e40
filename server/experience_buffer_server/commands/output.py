"""What commands print: tables, and what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from experience_buffer.errors import ExperienceBufferError
from experience_buffer_server.settings.server import ConfigurationError, explain
from experience_buffer_server.store.interface import StoreError

_WIDE = 10_000
"""Characters in a line that no table reaches."""


def show(table: Table) -> None:
    """Print a table; into a file or a pipe its lines go whole."""
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def failed(message: str, *, status: int) -> SystemExit:
    """Say what went wrong in one line; what to raise then."""
    typer.echo(f"experience-buffer: {message}", err=True)
    return SystemExit(status)


@contextmanager
def reported(*, status: int, also: type[Exception] = StoreError) -> Iterator[None]:
    """End with a status, and one line, where it fails for a reason that users can see to."""
    try:
        yield
    except ValidationError as error:
        raise failed(explain(error), status=status) from error
    except (ConfigurationError, ExperienceBufferError, StoreError, also) as error:
        raise failed(str(error), status=status) from error
