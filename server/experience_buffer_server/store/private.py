"""Files and folders of a store: made so that nobody but the server's user can read what is pushed.

What exists keeps its permissions; they are its owner's.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make a folder where there is none; folders above it get the usual permissions."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: a file that it makes is private."""
    return os.open(path, flags, FILE_MODE)


def others_may_enter(path: Path) -> bool:
    """Whether every user of the machine may reach or list what is in a folder, or read a file."""
    return bool(path.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH))
