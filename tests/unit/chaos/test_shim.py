"""The fault library stands before the file of large payloads as before LMDB's, and each by itself."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer_server.store.lmdb.large.payload_file import NAME
from tests.faults.power import SECTOR_BYTES, Loss, fail_power, read_notes
from tests.faults.shim import EVENTS, FILES, Faults, build

SIZE = 20 * 4096
"""Of one payload: whole blocks."""
BEGIN = f"""
import mmap, os, sys
from pathlib import Path
if sys.argv[2] == "cached":
    del os.O_DIRECT
from experience_buffer_server.store.lmdb.large.payload_file import Aligned, PayloadWriter
writer = PayloadWriter(Path(sys.argv[1]))
def put(place, letter, count=1):
    writer.write([(place * {SIZE}, memoryview(letter * ({SIZE} * count)))])
def put_in_pieces(place, letter):
    pieces = []
    for part in ({SIZE} // 4, 0, {SIZE} // 4 * 3):
        memory = memoryview(mmap.mmap(-1, part or 1))[:part]
        memory[:] = letter * part
        pieces.append(Aligned(memory, memory))
    starts = place * {SIZE}, place * {SIZE} + {SIZE} // 4, place * {SIZE} + {SIZE} // 4
    writer.write(list(zip(starts, pieces)))
def lmdb(*flags):
    return os.open(sys.argv[1] + "/data.mdb", os.O_RDWR | os.O_CREAT | sum(flags), 0o600)
"""


class Disk:
    """A folder, its faults, and processes that write there."""

    def __init__(self, library: Path, folder: Path, access: str) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        self.file = self.data / NAME
        self.faults = Faults(library, self.data, folder / "faults")
        self._access = access

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process of its own; it may die."""
        return subprocess.run(
            [sys.executable, "-c", BEGIN + code, str(self.data), self._access],
            env=os.environ | self.faults.environment(notes_writes=True),
            capture_output=True,
            text=True,
        )

    def write(self, code: str) -> None:
        """As `run`, of code that succeeds."""
        done = self.run(code)
        assert not done.returncode, done.stderr

    def fail_power(self, seed: int) -> dict[str, Loss]:
        """What a power failure took of each file."""
        chance = random.Random(seed)
        return {file.name: fail_power(file, undo, chance) for file, undo in self.faults.files}

    def fail_power_often(self, num_times: int) -> Iterator[dict[str, Loss]]:
        """The same, each time from where everything is now."""
        folders = [self.data, self.faults.files[0][1].parent]
        kept = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
        for seed in range(num_times):
            for path, content in kept.items():
                path.write_bytes(content)
            yield self.fail_power(seed)

    def num_notes(self) -> dict[str, int]:
        """Writes that may be lost, by file."""
        return {file.name: len(read_notes(undo)) for file, undo in self.faults.files}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture(params=["direct", "cached"])
def disk(library: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = Disk(library, tmp_path, request.param)
    yield made
    made.faults.close()


def letters(data: bytes) -> bytes:
    """The first byte of each sector, all of which are of one letter."""
    sectors = [data[start : start + SECTOR_BYTES] for start in range(0, len(data), SECTOR_BYTES)]
    assert all(sector == sector[:1] * SECTOR_BYTES for sector in sectors)
    return bytes(sector[0] for sector in sectors)


def test_what_no_sync_has_made_durable_may_be_lost_and_nothing_else(disk: Disk) -> None:
    kinds, lengths = set(), set()
    half = SIZE // SECTOR_BYTES
    disk.write("put(0, b'a', 2); writer.sync(); put(1, b'b', 2)")
    for loss in disk.fail_power_often(30):
        assert disk.num_notes()[NAME] == 0, "forgotten: they hold for this failure only"
        found = letters(disk.file.read_bytes())
        assert found[:half] == b"a" * half
        over, behind = found[half : 2 * half], found[2 * half :]
        assert set(over) <= set(b"ab")
        assert set(behind) <= set(b"\0b")
        if not loss[NAME].is_shorter:
            assert loss[NAME].num_lost_sectors == over.count(b"a") + behind.count(b"\0")
        kinds.add(frozenset(over))
        lengths.add(len(found) // half)
    assert kinds == {frozenset(b"a"), frozenset(b"b"), frozenset(b"ab")}
    assert lengths == {2, 3}


def test_what_was_synced_stays(disk: Disk) -> None:
    disk.write("put(0, b'a'); writer.sync(); put(0, b'b'); put(1, b'c'); writer.sync()")
    assert disk.num_notes() == {"data.mdb": 0, NAME: 0}
    for seed in range(5):
        assert disk.fail_power(seed)[NAME] == Loss(0, False)
    half = SIZE // SECTOR_BYTES
    assert letters(disk.file.read_bytes()) == b"b" * half + b"c" * half


def test_a_note_that_was_not_finished_is_of_a_write_that_was_not_begun(disk: Disk) -> None:
    disk.write("put(0, b'a'); put(0, b'b')")
    (undo,) = [undo for file, undo in disk.faults.files if file == disk.file]
    data = undo.read_bytes()
    for length, num_notes in {len(data): 2, len(data) - 1: 1, 32: 1, 31: 0, 0: 0}.items():
        undo.write_bytes(data[:length])
        assert disk.num_notes()[NAME] == num_notes


def test_a_later_process_makes_durable_what_one_that_died_has_left(disk: Disk) -> None:
    disk.run("put(0, b'a'); os.kill(os.getpid(), 9)")
    assert disk.num_notes()[NAME] == 1
    disk.write("put(1, b'b'); writer.sync()")
    assert disk.num_notes()[NAME] == 0


def test_a_sync_of_one_file_says_nothing_of_the_other(disk: Disk) -> None:
    disk.write("put(0, b'a'); file = lmdb(); os.pwrite(file, b'x' * 512, 0); os.fdatasync(file)")
    assert disk.num_notes() == {"data.mdb": 0, NAME: 1}
    disk.write("put(0, b'a'); os.pwrite(lmdb(), b'x' * 512, 0); writer.sync()")
    assert disk.num_notes() == {"data.mdb": 1, NAME: 0}
    disk.write("put(0, b'a'); os.pwrite(lmdb(os.O_DSYNC), b'x' * 512, 0)")
    assert disk.num_notes() == {"data.mdb": 1, NAME: 1}
    assert (disk.faults.num_syncs, disk.faults.num_payload_syncs) == (1, 1)


def test_what_was_cut_off_may_come_back(disk: Disk) -> None:
    disk.write(f"put(0, b'a', 3); writer.sync(); writer.cut({SIZE})")
    assert disk.file.stat().st_size == SIZE
    found = {letters(disk.file.read_bytes()) for _ in disk.fail_power_often(12)}
    half = SIZE // SECTOR_BYTES
    assert found == {b"a" * half, b"a" * 3 * half}


@pytest.mark.parametrize("name", FILES)
def test_a_new_file_may_be_gone_until_its_folder_is_on_disk(disk: Disk, name: str) -> None:
    file = disk.data / name
    write = f"file = os.open(sys.argv[1] + '/{name}', os.O_RDWR | os.O_CREAT, 0o600);"
    write += "os.pwrite(file, bytes(4096), 0); os.fsync(file);"
    disk.write(write)
    outcomes = {(loss[name].is_gone, file.exists()) for loss in disk.fail_power_often(12)}
    assert outcomes == {(True, False), (False, True)}
    file.unlink(missing_ok=True)
    disk.write(write + "os.fsync(os.open(sys.argv[1], os.O_RDONLY))")
    assert {(loss[name].is_gone, file.exists()) for loss in disk.fail_power_often(12)} == {
        (False, True)
    }


def test_a_full_disk_has_room_for_what_is_written_over_and_for_nothing_else(disk: Disk) -> None:
    disk.write("put(0, b'a', 2); writer.sync()")
    disk.faults.fill_disk()
    disk.write("put(0, b'b', 2); writer.sync()")
    ended = disk.run("put(1, b'c', 2)")
    assert f"[Errno {errno.ENOSPC}]" in ended.stderr
    assert disk.file.stat().st_size == 2 * SIZE
    disk.faults.fill_disk(left_bytes=SIZE + 4096)
    disk.write("put(2, b'c')")
    assert f"[Errno {errno.ENOSPC}]" in disk.run("put(3, b'd')").stderr
    assert disk.file.stat().st_size == 3 * SIZE + 4096, "it was full within a write"
    assert f"[Errno {errno.ENOSPC}]" in disk.run("os.pwrite(lmdb(), bytes(4096), 0)").stderr
    disk.write(f"put(0, b'e'); writer.cut({3 * SIZE}); os.pwrite(lmdb(), bytes(4096), 0)")
    disk.faults.fill_disk(full=False)
    disk.write("put(3, b'd')")


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_writes_and_syncs_fail_as_they_are_told_to(disk: Disk, number: int) -> None:
    disk.faults.fail_syncs(number, times=1)
    assert f"[Errno {number}]" in disk.run("put(0, b'a'); writer.sync()").stderr
    assert disk.num_notes()[NAME] == 1, "it isn't durable"
    disk.write("put(0, b'a'); writer.sync()")
    disk.faults.fail_writes(number)
    assert f"[Errno {number}]" in disk.run("put(0, b'b')").stderr
    assert letters(disk.file.read_bytes()) == b"a" * (SIZE // SECTOR_BYTES)


@pytest.mark.parametrize("put", ["put", "put_in_pieces"])
@pytest.mark.parametrize("event", [one for one in EVENTS if "payload" in one])
def test_a_process_dies_at_each_moment_of_a_write(disk: Disk, event: str, put: str) -> None:
    disk.write("put(0, b'a'); writer.sync()")
    disk.faults.kill_at(event)
    # LMDB's file has events of its own.
    others = "os.fsync(lmdb()); os.pwrite(lmdb(), b'x', 0)"
    ended = disk.run(f"{others}; {put}(0, b'b'); writer.sync()")
    assert ended.returncode == -signal.SIGKILL
    assert disk.faults.killed_at == event
    half = SIZE // SECTOR_BYTES // 2
    expected = {"before-payload": b"a" * 2 * half, "torn-payload": b"b" * half + b"a" * half}
    assert letters(disk.file.read_bytes()) == expected.get(event, b"b" * 2 * half)
    assert disk.num_notes()[NAME] == (event != "after-payload-sync")
    disk.faults.spare()
    disk.write("put(0, b'b'); writer.sync()")
