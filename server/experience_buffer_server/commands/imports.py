"""`experience-buffer import`: experiences from files into a running server's buffer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from experience_buffer_server.commands.looking import Looking, looks
from experience_buffer_server.commands.output import reported
from experience_buffer_server.commands.progress import bar

if TYPE_CHECKING:
    from experience_buffer import Client
    from experience_buffer.tables import TableRow

_SHOWN: Final = 20
_MOST_PROBLEMS: Final = 10_000
_CHUNK_BYTES: Final = 4 << 20
_CHUNK_ROWS: Final = 1000


@dataclass
class Taken:
    """What became of rows."""

    num_rows: int = 0
    num_stored: int = 0
    num_duplicates: int = 0
    num_refused: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    """File, row, uid and reason of those that were refused; the first ones."""

    def refuse(self, file: str, row: int, uid: str, reason: str) -> None:
        """Note a row that isn't stored."""
        self.num_refused += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append({"file": file, "row": row, "uid": uid, "reason": reason})


@looks
def import_files(
    look: Looking,
    files: Annotated[
        list[Path],
        typer.Argument(help="Files that `export` has written, or others with such columns."),
    ],
    buffer: Annotated[
        str,
        typer.Option("--buffer", "-b", help="The buffer.", show_default="as the first file says"),
    ] = "",
    create: Annotated[
        bool,
        typer.Option(
            "--create",
            help="Make the buffer, with the settings that the first file says, if need be.",
        ),
    ] = False,
    format: Annotated[
        str | None,
        typer.Option(help="parquet, arrow or jsonl.", show_default="as each file's name says"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check all rows, and store none.")
    ] = False,
) -> None:
    """Store the experiences of files in a buffer, in their order, byte for byte as they were pushed.

    What is there already is a duplicate, so the same file may be imported again, also after a part of
    it. Rows that can't be stored are listed with reasons; their neighbours are stored.

    Exit status 0: all rows are in the buffer; 1: some were refused; 2: the rest couldn't be tried.
    """
    began, taken = time.monotonic(), Taken()
    with reported(status=2, also=OSError):
        from experience_buffer import tables

        with tables.TableReader(files[0], format=format) as first:  # type: ignore[arg-type]
            about = first.about
        name = buffer or str(about.get("buffer") or "")
        if not name and not dry_run:
            name = look.buffer("")
        client = None if dry_run else look.patient_client()
        if client is not None:
            prepare(client, name, about, create=create)
        with bar("import") as show:
            for path in files:
                with tables.TableReader(path, format=format) as reader:  # type: ignore[arg-type]
                    for row in push_rows(client, name, str(path), reader, taken):
                        share = None if reader.num_rows is None else row / max(reader.num_rows, 1)
                        show(share, taken.num_rows)
    report(look, taken, {"files": [str(path) for path in files], "buffer": name}, began)


def prepare(client: Client, name: str, about: dict[str, Any], *, create: bool) -> None:
    """See that the buffer is there, or make it as a file says.

    Raises:
        BufferNotFoundError: It isn't there, and isn't to be made.
        InvalidRequestError: The file doesn't say how.
    """
    from experience_buffer import errors

    try:
        client.get_buffer(name)
    except errors.BufferNotFoundError as error:
        if not create:
            raise errors.BufferNotFoundError(
                f"{error}; --create makes it with the settings that the file says", subject=name
            ) from error
        config = about.get("config")
        if not isinstance(config, dict):
            raise errors.InvalidRequestError(
                f"the file doesn't say the settings of buffer {name!r} (lines of JSON never do): create it "
                "first",
                subject="create",
            ) from error
        client.create_buffer(settings_of(config) | {"name": name})


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """A buffer's settings as a file says them; what isn't set is left out."""
    return {
        key: settings_of(value) if isinstance(value, dict) else _each(value)
        for key, value in config.items()
        if value is not None
    }


def _each(value: Any) -> Any:
    if isinstance(value, list):
        return [settings_of(each) if isinstance(each, dict) else each for each in value]
    return value


def push_rows(
    client: Client | None,
    buffer: str,
    file: str,
    rows: Iterable[TableRow],
    taken: Taken,
    **options: Any,
) -> Iterator[int]:
    """Push rows in their order, the next ones being read meanwhile; the number of rows so far.

    Args:
        client: None: they are only read.
        buffer: The buffer's name.
        file: What they come from, for what is said of those that are refused.
        rows: The rows.
        taken: Counts what becomes of them.
        **options: Of `push`.
    """
    num_rows = 0
    with ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
        chunks = _chunks(rows)
        coming = thread.submit(next, chunks, None)
        while (chunk := coming.result()) is not None:
            coming = thread.submit(next, chunks, None)
            _push(client, buffer, file, chunk, taken, options)
            num_rows += len(chunk)
            yield num_rows


def _chunks(rows: Iterable[TableRow]) -> Iterator[list[TableRow]]:
    chunk: list[TableRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.payload)
        if num_bytes >= _CHUNK_BYTES or len(chunk) >= _CHUNK_ROWS:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _push(
    client: Client | None,
    buffer: str,
    file: str,
    chunk: Sequence[TableRow],
    taken: Taken,
    options: dict[str, Any],
) -> None:
    taken.num_rows += len(chunk)
    for row in chunk:
        if row.problem:
            taken.refuse(file, row.number, row.uid, row.problem)
    if client is None:
        return
    alive = [row for row in chunk if row.payload]
    dead = [row for row in chunk if row.tombstone is not None]
    result = client.push(
        [row.payload for row in alive],
        tombstones=[row.tombstone for row in dead if row.tombstone is not None],
        buffer=buffer,
        raise_on_refused=False,
        **options,
    )
    for row, outcome in zip([*alive, *dead], result.outcomes, strict=True):
        if outcome.status == "stored":
            taken.num_stored += 1
        elif outcome.status == "duplicate":
            taken.num_duplicates += 1
        else:
            taken.refuse(file, row.number, row.uid, f"{outcome.reason}: {outcome.message}")


def report(look: Looking, taken: Taken, facts: dict[str, Any], began: float) -> None:
    """Say what became of all rows, and end with a status."""
    seconds = time.monotonic() - began
    if look.as_json:
        counts = ("num_rows", "num_stored", "num_duplicates", "num_refused", "problems")
        summary = facts | {name: getattr(taken, name) for name in counts}
        look.json([summary | {"seconds": round(seconds, 3)}])
    else:
        look.say(*_said(taken, facts, seconds))
    raise SystemExit(1 if taken.num_refused else 0)


def _said(taken: Taken, facts: dict[str, Any], seconds: float) -> Iterator[str]:
    from experience_buffer_server.commands.terminal import clean

    rate = taken.num_rows / max(seconds, 1e-3)
    yield (
        f"{taken.num_rows:,} rows into buffer {clean(facts['buffer'])}: {taken.num_stored:,} stored, "
        f"{taken.num_duplicates:,} there already, {taken.num_refused:,} refused; "
        f"{seconds:.1f} s, {rate:,.0f}/s"
    )
    for each in taken.problems[:_SHOWN]:
        uid = f" {clean(each['uid'])}" if each["uid"] else ""
        yield f"  {clean(each['file'])} row {each['row']}{uid}: {clean(each['reason'])}"
    if taken.num_refused > _SHOWN:
        yield f"  ... and {taken.num_refused - _SHOWN:,} more; --json lists up to {_MOST_PROBLEMS:,}"
