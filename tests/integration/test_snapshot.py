"""Snapshots of real servers under load, and servers that go on from them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer import (
    Client,
    InvalidRequestError,
    SnapshotResult,
    WrongStateError,
)
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from experience_buffer_server.store.lmdb.verify.check import check
from tests.integration.plain import group
from tests.integration.server import MakeServer, Server, command, eventually, serving

SNAPSHOTS = '[snapshots]\npath = "snapshots"\n'
GROUP_SIZE = 3


def folder_of(server: Server) -> Path:
    return server.folder / "snapshots"


def restored(server: Server, taken: SnapshotResult, data: Path) -> None:
    restore(folder_of(server) / taken.name, data, verify=True)


def stored_tasks(client: Client) -> dict[str, int]:
    """How many members of each group are stored, by the group's key."""
    sizes: dict[str, int] = {}
    for one in client.list():
        sizes[one.tid] = sizes.get(one.tid, 0) + 1
    return sizes


class Load:
    """Pushes whole groups and learns from some, from two threads, until it is stopped."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.begun: list[str] = []
        """Groups whose push has begun, in order."""
        self.acked: list[str] = []
        """Groups whose push has been answered, in order."""
        self.consumed: set[str] = set()
        """Groups whose ack has been answered."""
        self.leased: set[str] = set()
        """Groups that were delivered."""
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._push, self._sample)
        ]

    def _push(self) -> None:
        with Client(self._address) as client:
            number = 0
            while not self._stop.is_set():
                members = group(f"t{number}", GROUP_SIZE)
                tid = members[0].eid.tid
                self.begun.append(tid)
                client.push(members)
                self.acked.append(tid)
                number += 1

    def _sample(self) -> None:
        with Client(self._address) as client:
            while not self._stop.is_set():
                batch = client.sample(1, timeout=0.5)
                self.leased.update(batch.groups)
                if batch and len(self.leased) % 3:
                    batch.ack()
                    self.consumed.update(batch.groups)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


GROUPS = f"""
[buffers.default]
group_size = {GROUP_SIZE}
consumers = [{{ name = "trainer", unit = "group" }}]
"""


def test_a_snapshot_under_load_is_a_prefix_of_what_happened(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(toml=SNAPSHOTS + GROUPS)
    with Client(server.address) as client, Load(server.address) as load:
        eventually(lambda: len(load.acked) > 20 and load.consumed, "some load")
        acked, consumed = list(load.acked), set(load.consumed)
        taken = client.snapshot()
        begun, leased = set(load.begun), set(load.leased)
    assert server.stop() == 0
    data = tmp_path / "restored"
    restored(server, taken, data)
    report = check(data)
    assert report.is_clean, report.findings
    assert report.buffers[0].num_experiences == taken.num_experiences
    shutil.rmtree(server.data)
    data.rename(server.data)
    server.start()
    with Client(server.address) as client:
        sizes = stored_tasks(client)
        assert set(sizes.values()) <= {GROUP_SIZE}, "groups are whole"
        # What was acknowledged before the call is there, or was consumed since.
        assert set(acked) - set(sizes) <= leased
        assert not consumed & set(sizes)
        # What began after its return isn't.
        assert set(sizes) <= begun
        pushed = group("t-new", GROUP_SIZE)
        assert client.push(pushed).num_stored == GROUP_SIZE
        again = group(acked[0].partition("/")[2], GROUP_SIZE)
        assert client.push(again).num_duplicates == GROUP_SIZE
        ready = set(client.sample(10_000, min_batch_size=1, timeout=0.5).groups)
        assert pushed[0].eid.tid in ready


def test_the_call_says_what_it_has_done(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS + "keep = 2\n")
    with Client(server.address) as client:
        client.push(group(1, 5))
        first = client.snapshot("first-one")
        path = folder_of(server) / first.name
        assert first.name.endswith("Z-first-one")
        assert first.num_experiences == 5
        assert first.num_bytes == (path / "data.mdb").stat().st_size
        assert time.time() - 60 < first.create_time < time.time()
        assert (0 < first.seconds < 60, first.removed) == (True, ())
        client.snapshot()
        done = command("snapshot", "--address", server.address, "--label", "third")
        assert done.returncode == 0, done.stderr
        assert f"removed {first.name}" in done.stdout
    listed = command("snapshots", folder_of(server), columns=60)
    assert listed.returncode == 0, listed.stderr
    assert first.name not in listed.stdout
    assert all(one.name in listed.stdout for one in folder_of(server).glob("snapshot-*"))
    assert len([line for line in listed.stdout.splitlines() if "yes" in line]) == 2
    assert 'experience_buffer_snapshots_total{outcome="taken"} 3.0' in server.metrics()
    lines = [json.loads(line) for line in server.log if "snapshot taken" in line]
    assert [line["num_experiences"] for line in lines] == [5, 5, 5]


def test_snapshots_are_off_unless_configured(shared_server: Server) -> None:
    off = pytest.raises(WrongStateError, match=r"set snapshots\.path")
    with Client(shared_server.address) as client, off:
        client.snapshot()
    done = command("snapshot", "--address", shared_server.address)
    assert (done.returncode, "snapshots.path" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "label", ["../../etc", "a/b", "..\\x", "a b", "x" * 65, "é", "a\0b", ".\n"]
)
def test_a_label_is_never_a_path(shared_snapshots: Server, label: str) -> None:
    with Client(shared_snapshots.address) as client:
        with pytest.raises(InvalidRequestError, match="1 to 64 letters") as caught:
            client.snapshot(label)
        assert caught.value.subject == "label"
    assert not folder_of(shared_snapshots).exists()


@pytest.fixture(scope="module")
def shared_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Server(tmp_path_factory.mktemp("snapshots"), toml=SNAPSHOTS)) as server:
        yield server


def test_snapshots_by_the_clock(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS + "interval_seconds = 1\nkeep = 2\n")

    def names() -> list[str]:
        return [one.name for one in SnapshotFolder(folder_of(server)).snapshots()]

    eventually(lambda: names() and names()[0].endswith("-1") and len(names()) == 2, "two of them")
    first = names()[0]
    eventually(lambda: first not in names(), "the first to go")
    assert server.stop() == 0
