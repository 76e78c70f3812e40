"""`experience-buffer export`: what is stored, as a file of rows, from a server or from a store at rest."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from experience_buffer_server.commands.at_rest import Data
from experience_buffer_server.commands.experiences import Run, State, Task, range_of
from experience_buffer_server.commands.looking import BufferName, Looking, looks
from experience_buffer_server.commands.output import reported
from experience_buffer_server.commands.progress import bar

if TYPE_CHECKING:
    from experience_buffer import Scan
    from experience_buffer.tables import TableWriter
    from experience_buffer_server.store.lmdb.rest.rest_scan import RestBuffer, RestScan

_SHOWN: Final = 20
"""Problems that are printed; `--json` has more."""
_MOST_PROBLEMS: Final = 10_000
_PART_OF_IT: Final = 3
"""Exit status where it was interrupted: the file holds what came before."""


def _range(help: str) -> Any:
    return typer.Option(metavar="LOW:HIGH", help=f"{help}; one of both may be left out.")


@dataclass
class Source:
    """Where experiences come from."""

    buffer: str
    scan: Scan | RestScan
    about: dict[str, Any]
    problems: Sequence[tuple[str, str]] = ()
    """What can't be read, as it is found; of a server each experience says it itself."""


@looks
def export(
    look: Looking,
    out: Annotated[
        Path,
        typer.Argument(help="The file: NAME.parquet, NAME.arrow or NAME.jsonl, also .jsonl.zst."),
    ],
    buffer: BufferName = "",
    data: Data = None,
    format: Annotated[
        str | None,
        typer.Option(help="parquet, arrow or jsonl.", show_default="as the file's name says"),
    ] = None,
    payloads: Annotated[
        bool,
        typer.Option(
            "--payloads/--no-payloads", help="Keep what was pushed, byte for byte, for import."
        ),
    ] = True,
    tokens: Annotated[
        bool, typer.Option("--tokens/--no-tokens", help="Fill the lists of tokens, logprobs, ...")
    ] = True,
    cursor: Annotated[
        str, typer.Option(help="Go on where an earlier export ended, which said this.")
    ] = "",
    task: Task = "",
    run: Run = "",
    prefix: Annotated[str, typer.Option(help="Whose uid begins so.")] = "",
    state: State = "",
    consumer: Annotated[
        str, typer.Option("--consumer", "-c", help="For which --state and --step hold.")
    ] = "",
    step: Annotated[int | None, typer.Option(help="Acknowledged with this training step.")] = None,
    reward: Annotated[str, _range("Reward")] = "",
    response_tokens: Annotated[str, _range("Response tokens")] = "",
    version: Annotated[str, _range("Policy versions")] = "",
    staleness: Annotated[str, _range("Policy versions behind")] = "",
    flag: Annotated[
        list[str] | None,
        typer.Option(
            help="singleton, zero_variance, zero_mask, bootstrapped or masked; may be repeated."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of this name.")] = False,
) -> None:
    """Write what is stored to a file that pandas, polars, datasets and `import` read.

    Nothing is consumed, and no consumer is needed. All filters that are given have to hold. Of a
    damaged store, what can be read is written, and what can't be is listed with reasons.

    Exit status 0: all is in the file; 1: all that can be read; 2: nothing; 3: interrupted, and the file
    holds what came before. It ends with a cursor, by which a later export goes on.
    """
    where: dict[str, Any] = {
        **{"tid": task, "rid": run, "uid_prefix": prefix, "consumer": consumer},
        **{"state": state or None, "step": step, "flags": flag or ()},
        "reward": range_of(reward, "--reward"),
        "response_tokens": range_of(response_tokens, "--response-tokens"),
        "policy_version": range_of(version, "--version"),
        "staleness": range_of(staleness, "--staleness"),
    }
    where = {key: value for key, value in where.items() if value not in (None, "", ())}
    with reported(status=2, also=OSError):
        from experience_buffer import tables

        source = (
            of_server(look, buffer, where, cursor=cursor)
            if data is None
            else of_store(data, buffer, where, cursor=cursor)
        )
        written = tables.TableWriter(
            out,
            format=format,  # type: ignore[arg-type]
            with_payloads=payloads,
            with_tokens=tokens,
            overwrite=force,
            about=source.about | {"filter": where} if where else source.about,
        )
    _write(look, source, written)


def of_server(look: Looking, name: str, where: dict[str, Any], *, cursor: str) -> Source:
    """The experiences of a running server's buffer."""
    buffer, about = _about_server(look, name)
    client = look.patient_client()
    return Source(buffer, client.scan(buffer=buffer, cursor=cursor, **where), about)


def of_server_step(look: Looking, name: str, consumer: str, step: int) -> Source:
    """What a training step has consumed, by a running server."""
    buffer, about = _about_server(look, name)
    client = look.patient_client()
    return Source(buffer, client.scan_step(step, consumer, buffer=buffer), about)


def _about_server(look: Looking, name: str) -> tuple[str, dict[str, Any]]:
    buffer = look.buffer(name)
    info = look.client.get_buffer(buffer)
    return buffer, {
        "buffer": buffer,
        "config": info.config.to_dict(),
        "policy_version": info.policy_version,
        "create_time": info.create_time,
        "export_time": time.time(),
    }


def of_store(data: Path, name: str, where: dict[str, Any], *, cursor: str) -> Source:
    """The experiences of a buffer of a store at rest."""
    from experience_buffer._messages.filters import filter_of
    from experience_buffer_server.store.lmdb.rest.rest_scan import RestScan, buffer_of

    found, problems = buffer_of(data, name)
    scan = RestScan(data, found, cursor, filter_of(where), problems=problems)
    return _of_rest(scan, found)


def of_store_step(data: Path, name: str, consumer: str, step: int) -> Source:
    """What a training step has consumed, by a store at rest."""
    from experience_buffer_server.store.lmdb.rest.rest_scan import RestScan, buffer_of

    found, problems = buffer_of(data, name)
    return _of_rest(RestScan(data, found, problems=problems, delivered=(consumer, step)), found)


def _of_rest(scan: RestScan, found: RestBuffer) -> Source:
    row = found.row
    about = {
        "buffer": row.name,
        "config": {"name": row.name, **json.loads(row.config)},
        "policy_version": row.policy_version,
        "create_time": row.create_time,
        "export_time": time.time(),
    }
    return Source(row.name, scan, about, scan.problems)


def _write(look: Looking, source: Source, writer: TableWriter) -> None:
    from experience_buffer.errors import ExperienceBufferError
    from experience_buffer_server.store.interface import StoreError

    cursor = source.scan.cursor
    began, problems, why = time.monotonic(), list[tuple[str, str]](), ""
    num_seen = 0
    try:
        with bar(f"export of {source.buffer}") as show, _stoppable(source) as stop:
            for each in source.scan:
                if stop.is_set():
                    break
                num_seen += 1
                if each.problem:
                    problems.append((each.summary.uid, each.problem))
                else:
                    writer.write((each,))
                cursor = each.cursor or cursor
                if num_seen % 256 == 0:
                    show(source.scan.progress, num_seen)
        if stop.is_set():
            why = "interrupted"
        else:
            cursor = source.scan.cursor
    except (ExperienceBufferError, StoreError, OSError) as error:
        why = str(error)
        if not num_seen:
            writer.abort()
            with reported(status=2, also=OSError):
                raise
    with reported(status=2, also=OSError):
        writer.close(cursor=cursor, is_complete=not why)
    problems = [*source.problems, *problems, *writer.problems]
    summary = {
        "file": str(writer.path),
        "buffer": source.buffer,
        "num_rows": writer.num_rows,
        "num_bytes": writer.path.stat().st_size,
        "is_complete": not why,
        "cursor": cursor,
        "seconds": round(time.monotonic() - began, 3),
        "num_problems": len(problems),
        "problems": [
            {"what": what, "reason": reason} for what, reason in problems[:_MOST_PROBLEMS]
        ],
    }
    if why:
        summary["message"] = why
    if look.as_json:
        look.json([summary])
    else:
        look.say(*_said(summary, problems))
    raise SystemExit(_PART_OF_IT if why else 1 if problems else 0)


@contextmanager
def _stoppable(source: Source) -> Iterator[threading.Event]:
    """Ctrl-C ends it behind a whole row; the second one at once."""
    stop = threading.Event()

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()
        # It may be waiting for a server.
        if hasattr(source.scan, "close"):
            source.scan.close()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _said(summary: dict[str, Any], problems: Sequence[tuple[str, str]]) -> Iterator[str]:
    from experience_buffer import _show
    from experience_buffer_server.commands.terminal import clean

    rate = summary["num_rows"] / max(summary["seconds"], 1e-3)
    yield (
        f"{summary['file']}: {_show.counted(summary['num_rows'], 'experience')} of buffer "
        f"{clean(summary['buffer'])}, {_show.size(summary['num_bytes'])}, "
        f"{summary['seconds']:.1f} s, {rate:,.0f}/s"
    )
    if problems:
        yield f"{_show.counted(len(problems), 'problem')}:"
    for what, reason in problems[:_SHOWN]:
        yield f"  {clean(what)}: {clean(reason)}"
    if len(problems) > _SHOWN:
        yield f"  ... and {len(problems) - _SHOWN:,} more; --json lists up to {_MOST_PROBLEMS:,}"
    if "message" in summary:
        yield f"not all of it: {clean(summary['message'])}"
    if summary["cursor"]:
        yield f"to go on from here: --cursor {summary['cursor']}"
