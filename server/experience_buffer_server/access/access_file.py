"""The access file on disk: read by the server, written by the command line."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from experience_buffer_server.access.grants import Grants, parse, read_entries
from experience_buffer_server.settings.access import GrantSettings
from experience_buffer_server.settings.server import ConfigurationError

_MAX_BYTES = 4 * 2**20
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*grants[ \t]*\]\]", re.MULTILINE)


def load(path: Path) -> tuple[Grants, str]:
    """Read the grants.

    Returns:
        The grants, and a warning about the file's permissions, empty where there is none.

    Raises:
        ConfigurationError: The file can't be used, or every user of the machine may write to it.
    """
    with _named(f"access.file {path}"):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH:
            raise ConfigurationError("every user of this machine may write to it: chmod 600")
        grants = parse(_text(path))
    if mode & stat.S_IROTH:
        return grants, f"access.file {path} can be read by every user of this machine: chmod 600"
    return grants, ""


def entries(path: Path) -> tuple[GrantSettings, ...]:
    """All entries, in the file's order; none where there is no file.

    Raises:
        ConfigurationError: The file can't be used.
    """
    with _named(str(path)):
        found = read_entries(_text(path) if path.exists() else "")
    return found


def add(path: Path, entry: GrantSettings) -> None:
    """Append an entry; the file is made, readable by its owner only, if there is none.

    Raises:
        ConfigurationError: The file can't be used or written.
    """
    _rewrite(path, lambda text: f"{text.rstrip()}\n\n{as_toml(entry)}".lstrip())


def remove(path: Path, chosen: Callable[[GrantSettings], bool]) -> list[GrantSettings]:
    """Take out entries and leave all other text, comments too, as it is.

    Returns:
        What was taken out.

    Raises:
        ConfigurationError: The file can't be used or written.
    """
    removed: list[GrantSettings] = []

    def without(text: str) -> str:
        all_entries = read_entries(text)
        starts = [match.start() for match in _HEADER.finditer(text)]
        if len(starts) != len(all_entries):
            raise ConfigurationError("the entries aren't [[grants]] tables; edit it by hand")
        kept = [text[: starts[0]]] if starts else [text]
        for entry, start, end in zip(all_entries, starts, [*starts[1:], len(text)], strict=True):
            block = text[start:end]
            if not chosen(entry):
                kept.append(block)
                continue
            removed.append(entry)
            # What is written below an entry, apart from it, belongs to the next one.
            kept.append(_comments_below(block))
        return "".join(kept)

    _rewrite(path, without)
    return removed


def as_toml(entry: GrantSettings) -> str:
    """One entry as it stands in a file."""
    lines = ["[[grants]]", f'name = "{entry.name}"']
    if entry.token_sha256:
        lines.append(f'token_sha256 = "{entry.token_sha256}"')
    else:
        escaped = entry.certificate_name.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'certificate_name = "{escaped}"')
    lines.append(f"roles = [{_quoted(entry.roles)}]")
    lines.append(f"buffers = [{_quoted(entry.buffers)}]")
    if entry.expires is not None:
        lines.append(f"expires = {entry.expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def _quoted(texts: tuple[str, ...]) -> str:
    return ", ".join(f'"{text}"' for text in texts)


def _comments_below(block: str) -> str:
    lines = block.splitlines(keepends=True)
    end = len(lines)
    while end and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return "".join(lines[end:]).lstrip("\n")


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(f"it is larger than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"it isn't UTF-8: {error}") from error


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Replace the file's text at once, alone: a reader sees the old text or the new one."""
    with _named(str(path)):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            changed = change(_text(path) if path.exists() else "")
            read_entries(changed)
            _replace(path, changed)
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say which file it is that can't be used.

    Raises:
        ConfigurationError: It can't.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{what}: can't read or write it: {error.strerror}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error


def _replace(path: Path, text: str) -> None:
    # A new file has mode 0600; where there is a link, what it leads to is replaced.
    target = path.resolve()
    number, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with open(number, "w", encoding="utf-8") as file:
            if target.exists():
                _keep_permissions(number, target)
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _keep_permissions(number: int, target: Path) -> None:
    """Give a new file the mode and owner of the one it replaces: the server must go on reading it."""
    old, new = target.stat(), os.fstat(number)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(number, old.st_uid, old.st_gid)
    os.fchmod(number, stat.S_IMODE(old.st_mode))
