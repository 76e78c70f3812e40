"""Snapshots that are cut short: by others, by a stop, by kills, by a full disk, by damage."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import (
    Client,
    DataLossError,
    ExperienceBufferError,
    InternalServerError,
    ResourceExhaustedError,
    SnapshotResult,
    UnavailableError,
)
from experience_buffer.v1 import service_pb2
from experience_buffer_server.store.lmdb.snapshots.folder import SnapshotFolder
from experience_buffer_server.store.lmdb.snapshots.restore import restore
from tests.integration.plain import error_of, experience, group
from tests.integration.server import MakeServer, Server, eventually
from tests.integration.test_snapshot import SNAPSHOTS, folder_of

COPIER = "snapshots.copy_process"


@contextmanager
def stopped_copier(server: Server) -> Iterator[tuple[threading.Thread, list[Any]]]:
    """A snapshot whose process stands still; with the thread that waits for it, and its result."""
    results: list[Any] = []

    def ask() -> None:
        with Client(server.address) as client:
            try:
                results.append(client.snapshot("stopped", timeout=60))
            except ExperienceBufferError as error:
                results.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    (pid,) = eventually(lambda: server.children(COPIER), "the process")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield thread, results
    finally:
        if pid in server.children(COPIER):
            os.kill(pid, signal.SIGCONT)
        thread.join(60)
    assert not thread.is_alive()


def test_one_at_a_time(make_server: MakeServer) -> None:
    """Who asks without a client is told when to come again; a client waits for its turn."""
    server = make_server(toml=SNAPSHOTS)
    with Client(server.address) as client, server.stub() as stub:
        client.push(group(1, 3))
        with stopped_copier(server) as (_, results):
            request = service_pb2.SnapshotRequest()
            code, text, details = error_of(lambda: stub.Snapshot(request, timeout=20))
            assert code == "RESOURCE_EXHAUSTED"
            assert "one at a time" in text
            assert details["RetryInfo"].retry_delay.ToSeconds() == 1
            with pytest.raises(ResourceExhaustedError, match="has been under way"):
                client.snapshot(timeout=1.5)
            client.push(group(2, 3))
            for pid in server.children(COPIER):
                os.kill(pid, signal.SIGCONT)
            assert client.snapshot("second").num_experiences == 6
        assert isinstance(results[0], SnapshotResult)
    assert [one.problem for one in SnapshotFolder(folder_of(server)).snapshots()] == ["", ""]


def test_a_stop_ends_the_snapshot(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS)
    with stopped_copier(server) as (_, results):
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 8, "less than the grace period"
        server.start()  # Where the waiting client goes on to: what was given up is taken then.
    assert isinstance(results[0], SnapshotResult | UnavailableError), results
    assert all(not one.problem for one in SnapshotFolder(folder_of(server)).snapshots())
    assert not list(folder_of(server).glob(".partial-*"))


def test_a_killed_copy_is_an_error_and_leaves_nothing(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS)
    with Client(server.address) as client:
        client.push([experience(1, run) for run in range(7)])
        with stopped_copier(server) as (_, results):
            (pid,) = server.children(COPIER)
            os.kill(pid, signal.SIGKILL)
        assert isinstance(results[0], InternalServerError)
        assert _visible(server) == []
        assert client.snapshot().num_experiences == 7, "the server goes on"


def _visible(server: Server) -> list[str]:
    """What there is in the folder beside the file that is locked."""
    return [path.name for path in folder_of(server).glob("*") if path.name != ".lock"]


def test_kills_at_any_moment_leave_only_whole_snapshots(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Of the copying process, or of the server with all that it has started."""
    server = make_server(toml=SNAPSHOTS)
    moments = random.Random(1019)
    num_published = 0
    for life in range(4):
        with Client(server.address) as client:
            client.push([experience(life, run, info={"x": "y" * 4096}) for run in range(31)])
            asking = threading.Thread(target=_ask, args=(server.address,), daemon=True)
            asking.start()
            (pid,) = eventually(lambda: server.children(COPIER), "the process")
            threading.Event().wait(moments.uniform(0.0, 1.2))
            if life % 2:
                server.kill()
            elif pid in server.children(COPIER):
                os.kill(pid, signal.SIGKILL)
        asking.join(60)
        for one in SnapshotFolder(folder_of(server)).snapshots():
            assert not one.problem
        num_published = len(SnapshotFolder(folder_of(server)).snapshots())
        if life % 2:
            server.start()
            assert not list(folder_of(server).glob(".partial-*")), "the start tidies up"
    with Client(server.address) as client:
        taken = client.snapshot()
    restore(folder_of(server) / taken.name, tmp_path / "restored", verify=True)
    assert taken.num_experiences == 4 * 31
    assert len(_visible(server)) == num_published + 1


def _ask(address: str) -> None:
    with Client(address) as client, contextlib.suppress(ExperienceBufferError):
        client.snapshot(timeout=20)


def test_a_full_disk_is_said_and_the_server_goes_on(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS)
    with Client(server.address) as client:
        client.push([experience(1, run, info={"x": "y" * 65536}) for run in range(7)])
        with stopped_copier(server) as (_, results):
            (pid,) = server.children(COPIER)
            # For this process the disk ends here.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (65536, 65536))
        assert isinstance(results[0], ResourceExhaustedError)
        assert "no room for the copy" in str(results[0])
        assert _visible(server) == []
        client.push([experience(2, run) for run in range(3)])
        assert client.snapshot().num_experiences == 10


def test_a_damaged_store_gives_no_snapshot(make_server: MakeServer) -> None:
    server = make_server(toml=SNAPSHOTS)
    mark = "A rather remarkable text. " * 40
    with Client(server.address) as client:
        client.push([experience(1, run, info={"x": mark}) for run in range(3)])
        server.stop()
        data = (server.data / "data.mdb").read_bytes()
        (server.data / "data.mdb").write_bytes(data.replace(b"remarkable", b"ReMarkable"))
        server.start()
        with pytest.raises(DataLossError, match="experience-buffer verify"):
            client.snapshot()
        assert _visible(server) == []
        assert len(list(client.list())) == 3, "the server goes on"
