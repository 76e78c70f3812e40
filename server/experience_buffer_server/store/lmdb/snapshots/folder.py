"""A folder of snapshots: their names, which of them are whole, how they appear and go.

A snapshot is made under a name that begins with `.partial-` and gets its own name by a rename once
all of it is on disk; it loses it in the same way. So what has its own name is whole.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from experience_buffer_server.store.lmdb.disk import private_files
from experience_buffer_server.store.lmdb.disk.private_files import sync
from experience_buffer_server.store.lmdb.large.payload_file import NAME as PAYLOADS_NAME
from experience_buffer_server.store.lmdb.snapshots.manifest import (
    Manifest,
    OtherVersionError,
    SnapshotBusyError,
    SnapshotError,
    read_manifest,
)

DATA_NAME = "data.mdb"
PARTIAL_PREFIX = ".partial-"
LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a label may be: never a path."""
_LOCK_NAME = ".lock"
_PREFIX = "snapshot-"
_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot of a folder."""

    path: Path
    manifest: Manifest | None
    """None where it can't be read."""
    problem: str
    """Why it can't be restored, as far as its sizes and its manifest tell; else empty."""
    create_time: datetime = _BEGINNING
    """When it was taken; where its manifest doesn't tell, the beginning of time."""
    is_whole: bool = True
    """This version of the server can restore it, or another one."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.path.name


def look_at(path: Path) -> Snapshot:
    """What a snapshot's folder holds, without reading the data."""
    try:
        manifest = read_manifest(path)
    except OtherVersionError as error:
        time = error.create_time or _BEGINNING
        return Snapshot(path=path, manifest=None, problem=str(error), create_time=time)
    except SnapshotError as error:
        return Snapshot(path=path, manifest=None, problem=str(error), is_whole=False)
    sizes = {DATA_NAME: manifest.data_bytes, PAYLOADS_NAME: manifest.payloads_bytes}
    problems = [_size_problem(path / name, size) for name, size in sizes.items()]
    problem = "; ".join(filter(None, problems))
    return Snapshot(
        path=path,
        manifest=manifest,
        problem=problem,
        create_time=manifest.create_time,
        is_whole=not problem,
    )


def _size_problem(path: Path, wanted: int) -> str:
    """Why a file isn't the one of the manifest, as far as its size tells. 0 bytes: no file."""
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError as error:
        return f"{path.name}: {error.strerror}" if wanted else ""
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if num_bytes == wanted:
        return ""
    return f"{path.name} has {num_bytes} bytes, its manifest says {wanted}"


class SnapshotFolder:
    """The snapshots in a folder. Whoever changes it holds `locked`; anyone may look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        """What could not be removed, and why: it costs no snapshot."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the end of this process, however it comes, lets them in.

        Raises:
            SnapshotBusyError: Another process is at work here.
        """
        with open(self.path / _LOCK_NAME, "ab", opener=private_files.opener) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SnapshotBusyError(
                    f"another process is writing a snapshot to {self.path}; wait for it"
                ) from None
            yield

    def clean(self) -> list[str]:
        """Remove what an interrupted snapshot, or removal, has left; the names."""
        paths = self.path.glob(f"{PARTIAL_PREFIX}*")
        leftovers = sorted(path for path in paths if path.is_dir() or path.is_symlink())
        return [leftover.name for leftover in leftovers if self._removed(leftover)]

    def begin(self, label: str, time: datetime) -> Path:
        """Make the folder that a snapshot is written to, until `publish` or `discard`."""
        stem = f"{_PREFIX}{time.astimezone(UTC):%Y%m%dT%H%M%SZ}-"
        numbered = (f"{label}-{number}" if label else str(number) for number in count(1))
        names = (stem + ending for ending in chain([label] if label else [], numbered))
        name = next(name for name in names if not (self.path / name).exists())
        partial = self.path / f"{PARTIAL_PREFIX}{name}"
        partial.mkdir(mode=private_files.FOLDER_MODE)
        return partial

    def publish(self, partial: Path) -> Path:
        """Give a snapshot, whose files are on disk, its own name; its path from then on."""
        sync(partial)
        path = self.path / partial.name.removeprefix(PARTIAL_PREFIX)
        partial.rename(path)
        sync(self.path)
        return path

    def discard(self, partial: Path) -> None:
        """Remove what `begin` made."""
        shutil.rmtree(partial)

    def remove(self, snapshot: Snapshot) -> bool:
        """Remove a snapshot; interrupted, it isn't one any more. Whether it is gone."""
        partial = self.path / f"{PARTIAL_PREFIX}removed-{snapshot.name}"
        try:
            snapshot.path.rename(partial)
            sync(self.path)
        except OSError as error:
            self._note(snapshot.path, error)
            return False
        return self._removed(partial)

    def _removed(self, path: Path) -> bool:
        """Remove a folder. Of a link, the link alone: what it leads to is somebody's."""
        try:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            self._note(path, error)
            return False
        return True

    def _note(self, path: Path, error: OSError) -> None:
        self.problems.append(f"can't remove {path}: {error.strerror}")

    def keep_newest(self, num: int, *, taken: Path) -> list[str]:
        """Remove whole snapshots but the newest; the names of the removed ones, oldest first.

        Those of another version count by their age: else they would stay for ever after an upgrade.

        Args:
            num: How many stay; 0: all.
            taken: The one taken just now: it stays whatever the clock said before.
        """
        if not num:
            return []
        others = [one for one in self.snapshots() if one.is_whole and one.path != taken]
        going = others[: max(len(others) - (num - 1), 0)]
        return [snapshot.name for snapshot in going if self.remove(snapshot)]

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first, those that can't be restored included."""
        paths = (path for path in self.path.glob(f"{_PREFIX}*") if path.is_dir())
        return sorted(map(look_at, paths), key=lambda one: (one.create_time, one.name))
