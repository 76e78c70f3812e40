"""Looking at a store without a server: `--data` in place of an address. It is opened read-only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from experience_buffer_server.commands.looking import Looking, failed_json

if TYPE_CHECKING:
    from experience_buffer.scanned import ScannedExperience

Data: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a store to read in place of a server, damaged or not; a server may use it."
    ),
]


@contextmanager
def stored(
    look: Looking, data: Path, buffer: str, where: dict[str, Any], *, with_payloads: bool
) -> Iterator[Iterator[ScannedExperience]]:
    """The experiences of a buffer of a store, oldest first; what can't be read is said at the end.

    Args:
        look: How errors are said.
        data: The store's folder.
        buffer: Its buffer; empty: the only one.
        where: Which experiences, as for `list`.
        with_payloads: Whether payloads are read, too.
    """
    from experience_buffer._messages.filters import filter_of
    from experience_buffer_server.commands.output import failed
    from experience_buffer_server.commands.terminal import clean
    from experience_buffer_server.store.interface import StoreError
    from experience_buffer_server.store.lmdb.rest.rest_scan import RestScan, buffer_of

    try:
        found, problems = buffer_of(data, buffer)
        scan = RestScan(
            data, found, where=filter_of(where), with_payloads=with_payloads, problems=problems
        )
        yield iter(scan)
    except (StoreError, OSError) as error:
        if look.as_json:
            raise failed_json(type(error).__name__, str(error), "", 2) from error
        raise failed(str(error), status=2) from error
    for what, reason in scan.problems:
        typer.echo(f"can't be read: {clean(what)}: {clean(reason, most_chars=1000)}", err=True)
