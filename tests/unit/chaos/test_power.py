"""A power failure takes what no sync has made durable, and nothing else."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from tests.faults.power import SECTOR_BYTES, fail_power, read_notes

PAGE_BYTES = 4096


def make(folder: Path, *, num_pages: int = 7, size_before: int = 3) -> tuple[Path, Path, bytes]:
    """A file of ones whose pages were all written over with twos, and the notes of that."""
    before = b"\x01" * (size_before * PAGE_BYTES)
    file, undo = folder / "file", folder / "undo"
    with undo.open("wb") as notes:
        size = len(before)
        for page in range(num_pages):
            kept = before[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            notes.write(struct.pack("<4q", page * PAGE_BYTES, PAGE_BYTES, size, len(kept)) + kept)
            size = max(size, (page + 1) * PAGE_BYTES)
    file.write_bytes(b"\x02" * (num_pages * PAGE_BYTES))
    return file, undo, before


def test_every_sector_is_what_it_was_or_what_was_written(tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(60):
        file, undo, before = make(tmp_path)
        loss = fail_power(file, undo, random.Random(seed))
        after = file.read_bytes()
        assert loss.num_writes == 7
        assert not undo.exists(), "forgotten: it holds for this failure only"
        kinds = set()
        for start in range(0, len(after), SECTOR_BYTES):
            was = before[start : start + SECTOR_BYTES] or bytes(SECTOR_BYTES)
            sector = after[start : start + SECTOR_BYTES]
            assert sector in (was, b"\x02" * SECTOR_BYTES)
            kinds.add(sector == was)
        assert len(after) == (3 if loss.is_shorter else 7) * PAGE_BYTES
        outcomes.add((frozenset(kinds), loss.is_shorter))
    assert len(outcomes) == 4, "all kept, all lost, some of each, and the growth lost with them"


def test_a_note_that_was_not_finished_is_of_a_write_that_was_not_begun(tmp_path: Path) -> None:
    _, undo, _ = make(tmp_path)
    data = undo.read_bytes()
    for length in (len(data) - 1, 32 + PAGE_BYTES + 31, 31, 0):
        undo.write_bytes(data[:length])
        assert len(read_notes(undo)) < 7
    undo.unlink()
    assert read_notes(undo) == []
