"""`experience-buffer token new | list | revoke`: the access file's entries."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experience_buffer_server.commands.output import failed, reported, show

if TYPE_CHECKING:
    from experience_buffer_server.settings.access import GrantSettings

app = typer.Typer(help="Tokens and grants of an access file.", no_args_is_help=True)

_PREFIX = "ebt_"
"""Lets scanners for secrets recognise a token."""
_RANDOM_BYTES = 32
_ID_LENGTH = 12

File = Annotated[Path, typer.Option("--file", help="The access file.")]


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Who gets it: shown in logs, counted by quotas.")],
    role: Annotated[
        list[str], typer.Option(help="push, sample, look, operate or metrics; may be repeated.")
    ],
    buffer: Annotated[
        list[str] | None,
        typer.Option(help='Name, or beginning and "*"; may be repeated.', show_default="all"),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=36_500, help="Days until it expires.", show_default="it never does"
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", help="Append the entry to this access file.", show_default="it is printed"
        ),
    ] = None,
) -> None:
    """Make a token; it is shown once, the file keeps only its digest.

    An entry of the same name that exists stays: change the callers over, then revoke it.
    """
    from experience_buffer_server.access import access_file
    from experience_buffer_server.settings.access import GrantSettings

    token = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with reported(status=2):
        entry = GrantSettings.model_validate(
            {
                "name": name,
                "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
                "roles": role,
                "buffers": buffer or ["*"],
                "expires": expires and expires.replace(microsecond=0),
            }
        )
        if file is not None:
            access_file.add(file, entry)
    typer.echo(token)
    typer.echo(access_file.as_toml(entry) if file is None else f"added to {file}", err=True)


@app.command("list")
def list_entries(file: File) -> None:
    """Show the entries of an access file."""
    from experience_buffer_server.commands import terminal

    rows = [
        (
            *(id_of(entry), entry.name),
            "a token" if entry.token_sha256 else f"certificate {entry.certificate_name}",
            *(", ".join(entry.roles), ", ".join(entry.buffers), _expiry(entry)),
        )
        for entry in _entries(file)
    ]
    show(terminal.table("!id", "name", "for", "roles", "buffers", "expires", rows=rows))


@app.command()
def revoke(
    file: File,
    name: Annotated[str | None, typer.Option(help="All entries of this name.")] = None,
    id: Annotated[str | None, typer.Option(help="The entries with this id, see `list`.")] = None,
) -> None:
    """Take entries out of an access file; servers that use it refuse their holders in a second."""
    if name is None and id is None:
        raise failed("say which: --name, --id or both", status=2)
    from experience_buffer_server.access import access_file

    with reported(status=2):
        removed = access_file.remove(
            file,
            lambda entry: (
                (name is None or entry.name == name) and (id is None or id_of(entry) == id)
            ),
        )
    for entry in removed:
        typer.echo(f"revoked {id_of(entry)} {entry.name}: {', '.join(entry.roles)}")
    if not removed:
        raise failed(f"{file} has no such entry", status=2)


def id_of(entry: GrantSettings) -> str:
    """Tells the credentials of one name apart; says nothing about a token."""
    if entry.token_sha256:
        return entry.token_sha256[:_ID_LENGTH]
    return hashlib.sha256(entry.certificate_name.encode()).hexdigest()[:_ID_LENGTH]


def _expiry(entry: GrantSettings) -> str:
    if entry.expires is None:
        return "never"
    text = entry.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{text} (over)" if entry.expires <= datetime.now(UTC) else text


def _entries(file: Path) -> tuple[GrantSettings, ...]:
    if not file.exists():
        raise failed(f"there is no file {file}", status=2)
    from experience_buffer_server.access import access_file

    with reported(status=2):
        return access_file.entries(file)
