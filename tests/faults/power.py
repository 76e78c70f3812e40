"""The power fails: what a disk may hold of the writes that no sync has made durable.

`shim.c` notes what each write replaces, until a sync has ended. A disk may have taken any of these
writes, in any order, and of one write any sectors; it takes a sector whole. What it has taken of one
file says nothing of the other.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<4q")
_CUT: Final = -1
SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Note:
    """One write that may be lost."""

    offset: int
    length: int
    size: int
    """How long the file was before."""
    replaced: bytes
    """What was there, as far as the file went."""
    is_cut: bool = False
    """Not a write: the file was cut off at the offset."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a power failure took."""

    num_lost_sectors: int
    is_shorter: bool
    """The file's growth is lost, too."""
    is_gone: bool = False
    """The file was new, and the folder isn't on disk that names it."""


def read_notes(undo: Path) -> list[Note]:
    """The writes since the last sync; one that was being noted has not begun."""
    data = undo.read_bytes() if undo.exists() else b""
    notes = []
    start = 0
    while start + _HEADER.size <= len(data):
        offset, length, size, kept = _HEADER.unpack_from(data, start)
        start += _HEADER.size + kept
        if start <= len(data):
            is_cut = length == _CUT
            replaced = data[start - kept : start]
            notes.append(Note(offset, kept if is_cut else length, size, replaced, is_cut))
    return notes


def fail_power(file: Path, undo: Path, chance: random.Random) -> Loss:
    """Make of a file whose processes are dead what the disk could hold, and forget the notes."""
    notes = read_notes(undo)
    undo.unlink(missing_ok=True)
    new = undo.with_name(undo.name + ".new")
    if new.exists():
        new.unlink()
        if file.exists() and chance.random() < 0.5:
            num_sectors = -(-file.stat().st_size // SECTOR_BYTES)
            file.unlink()
            return Loss(num_sectors, False, is_gone=True)
    if not notes:
        return Loss(0, False)
    lost_share = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    by_sector = chance.random() < 0.5
    # The last so many writes are the ones at risk, or all of them.
    first = chance.randrange(len(notes)) if chance.random() < 0.3 else 0
    num_lost = 0
    with file.open("r+b") as disk:
        # Backwards, so that what was there first is what stays.
        for note in reversed(notes[first:]):
            if not by_sector and chance.random() >= lost_share:
                continue
            # What a file system frees it frees as a whole.
            if by_sector and note.is_cut and chance.random() >= lost_share:
                continue
            for start in range(0, note.length, SECTOR_BYTES):
                if by_sector and not note.is_cut and chance.random() >= lost_share:
                    continue
                end = min(start + SECTOR_BYTES, note.length)
                # Beyond the old end of the file there was nothing: it reads as zeros.
                before = note.replaced[start:end].ljust(end - start, b"\0")
                disk.seek(note.offset + start)
                disk.write(before)
                num_lost += 1
        size = notes[0].size
        is_shorter = first == 0 and lost_share == 1.0 and size > 0
        if is_shorter:
            disk.truncate(size)
    return Loss(num_lost, is_shorter)
