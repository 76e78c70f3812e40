"""Files and folders of a store: made so that nobody but the server's user can read what is pushed.

What exists keeps its permissions; they are its owner's. New ones survive a power failure.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that don't exist, and have their names on disk.

    Those above it get the usual permissions.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    for one in reversed(missing):
        sync(one.parent)


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: a file that it makes is private."""
    return os.open(path, flags, FILE_MODE)


def free_bytes(path: Path) -> int:
    """What is free on the disk of a file or folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def others_may_enter(path: Path) -> bool:
    """Whether every user of the machine may reach or list what is in a folder, or read a file."""
    return bool(path.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH))
