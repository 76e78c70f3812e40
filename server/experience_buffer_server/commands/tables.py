"""Tables that commands print."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

_WIDE = 10_000
"""Characters in a line that no table reaches."""


def show(table: Table) -> None:
    """Print a table; into a file or a pipe its lines go whole."""
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)
