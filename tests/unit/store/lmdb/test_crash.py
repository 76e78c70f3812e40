"""Real processes, killed at arbitrary moments: what was acknowledged is there, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.store.conftest import OpenStore
from tests.unit.store.lmdb import crash_driver as driver

ROUNDS = 8


def run_until_killed(path: Path, first: int, victim: str, choices: random.Random) -> list[int]:
    """Kill at a random moment; everything that was acknowledged by then and later."""
    with subprocess.Popen(
        [sys.executable, driver.__file__, str(path), str(first)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        writer_pid = int(owner.stdout.readline())
        acked = [int(owner.stdout.readline()) for _ in range(choices.randrange(1, 60))]
        # An acknowledgement ends a transaction; this reaches every part of the next one.
        moment = time.monotonic() + choices.uniform(0.0, 0.003)
        while time.monotonic() < moment:
            pass
        if victim in ("writer", "both"):
            os.kill(writer_pid, signal.SIGKILL)
        if victim in ("owner", "both"):
            owner.kill()
        for line in owner.stdout:
            if line.endswith("\n"):
                acked.append(int(line))
        expected = {"owner": {-9}, "writer": {3}, "both": {-9, 3}}[victim]
        assert owner.wait() in expected
    return acked


def check_whole(store: LmdbStore, acked: set[int]) -> int:
    """Every batch is there as a whole or not at all, and the acknowledged ones are; the newest."""
    (state,) = store.load()
    assert store.damaged == []
    members: dict[int, list[int]] = {}
    for record in state.records:
        number, index = divmod(record.seq, driver.SIZE)
        assert record == driver.record(number, index)
        members.setdefault(number, []).append(index)
    for number, indices in members.items():
        assert indices == list(range(driver.SIZE)), f"batch {number} is partial"
        uids = [driver.record(number, index).uid for index in indices]
        assert store.payloads(1, uids) == [driver.payload(number, index) for index in indices]
    assert {group.id for group in state.groups} == set(members)
    newest = max(members, default=0)
    removed = set(range(1, newest - driver.KEPT + 1))
    assert acked <= set(members) | removed
    remembered = store.recall(1, "uid", [str(number) for number in sorted(acked | set(members))])
    assert remembered == [b"digest"] * len(remembered)
    gone = [driver.record(number, 0).uid for number in removed]
    assert store.payloads(1, gone) == [None] * len(gone)
    return newest


@pytest.mark.parametrize("victim", ["owner", "writer", "both"])
async def test_a_kill_loses_nothing_acknowledged_and_leaves_no_part(
    open_store: OpenStore, path: Path, victim: str
) -> None:
    choices = random.Random(victim)
    acked: set[int] = set()
    newest = 0
    for _ in range(ROUNDS):
        acked.update(run_until_killed(path, newest + 1, victim, choices))
        # At once: what is left of the last writer may still be finishing.
        store = await open_store()
        newest = check_whole(store, acked)
        assert newest >= max(acked)
        await store.close()
