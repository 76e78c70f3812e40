"""Processes to be killed, what they wrote down, and the checks of it against the promises."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer.v1 import service_pb2
from tests.integration import kill_worker
from tests.integration.plain import summaries
from tests.integration.server import Stub, eventually

GROUP_SIZE = 4
LEASE_SECONDS = 3.0
SLACK_SECONDS = 1.5
"""Time between the server's grant of a lease and the trainer's note of it, at most."""


@dataclass
class Process:
    """A worker or trainer, its journal, and the lives it had."""

    arguments: list[str]
    journal: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        command = [sys.executable, kill_worker.__file__, *self.arguments, str(self.journal)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)

    @property
    def is_over(self) -> bool:
        """Whether its present life was ended by `kill`, all of what it had to say read."""
        return self.process.stderr is None or self.process.stderr.closed

    def kill(self) -> None:
        self.process.kill()
        assert self.process.stderr is not None
        problems = self.process.stderr.read().decode()
        self.process.stderr.close()
        self.process.wait()
        assert not problems, problems

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        if not self.journal.exists():
            return []
        lines = self.journal.read_bytes().splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [entry for entry in entries if not kinds or entry["event"] in kinds]


def member(task: int, run: int) -> Experience:
    """Experiences of different sizes, made without a generator, since there are many."""
    length = 3 + (task * 7 + run) % 19
    return Experience(
        eid=EID(batch=task % 5, task=task, run=run, step=0, suffix="5eed"),
        tokens=torch.arange(2 + length, dtype=torch.int32),
        prompt_length=2,
        reward=((task * 31 + run * 17) % 11) / 3.0,
        response_text=f"{task} {run} " * (1 + task % 53),
    )


def write_work(path: Path, pushes: list[list[Experience]]) -> list[list[bytes]]:
    """Write the pushes of one worker; their canonical single payloads."""
    payloads = [trxp.encode(experiences) for experiences in pushes]
    path.write_bytes(
        b"".join(kill_worker.LENGTH.pack(len(payload)) + payload for payload in payloads)
    )
    return [trxp.split(payload) for payload in payloads]


def uid_of(payload: bytes) -> str:
    [item] = trxp.read(payload)
    assert isinstance(item, trxp.Item)
    return item.uid


def acked_pushes(workers: list[Process]) -> set[tuple[int, int]]:
    """Worker and index of every push that was acknowledged."""
    return {
        (number, entry["index"])
        for number, worker in enumerate(workers)
        for entry in worker.events("acked")
    }


def check_contents(
    stub: Stub,
    works: list[list[list[bytes]]],
    acked: set[tuple[int, int]],
    checked: set[str],
) -> None:
    """Every push is stored whole and once or not at all, and not at all only if unacknowledged."""
    listed = [one.uid for one in summaries(stub, "b")]
    stored = set(listed)
    assert len(listed) == len(stored), "an experience is stored twice"
    total = 0
    for number, work in enumerate(works):
        for index, payloads in enumerate(work):
            names = [uid_of(payload) for payload in payloads]
            present = [name for name in names if name in stored]
            assert len(present) in (0, len(names)), "a push is stored in part"
            assert present or (number, index) not in acked, "an acknowledged push is lost"
            total += len(present)
            for name, payload in zip(names, payloads, strict=True):
                if name in stored and name not in checked:
                    found = stub.Get(service_pb2.GetRequest(buffer="b", uid=name))
                    assert found.payload == payload, "a payload has changed"
                    assert found.summary.payload_bytes == len(payload)
                    checked.add(name)
    assert total == len(stored)


def wait_for_more(count: Callable[[], int], more: int, what: str) -> None:
    goal = count() + more
    eventually(lambda: count() >= goal, f"{more} more {what}")


def expected_advantages(num_groups: int) -> dict[str, tuple[str, float]]:
    """Group and advantage of every experience by uid."""
    expected = {}
    for task in range(num_groups):
        members = [member(task, run) for run in range(GROUP_SIZE)]
        rewards = [one.reward for one in members if one.reward is not None]
        mean = math.fsum(rewards) / GROUP_SIZE
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (GROUP_SIZE - 1)
        for one, reward in zip(members, rewards, strict=True):
            score = (reward - mean) / (math.sqrt(variance) + 1e-6)
            expected[one.eid.uid] = one.eid.tid, score
    return expected


@dataclass
class Delivery:
    """One lease as its trainer saw it."""

    time: float
    items: list[tuple[str, str, float, int]]
    end: str = ""
    """The last thing that happened to it: "acking", "acked", "nacking", "nacked", "lost"..."""
    end_time: float = math.inf


def check_deliveries(processes: list[Process], num_groups: int, *, by_group: bool) -> None:
    expected = expected_advantages(num_groups)
    deliveries: dict[int, Delivery] = {}
    for process in processes:
        for entry in process.events():
            if entry["event"] == "ready":
                continue
            if entry["event"] == "leased":
                assert entry["lease"] not in deliveries, "two leases of one id"
                deliveries[entry["lease"]] = Delivery(entry["time"], entry["items"])
            else:
                delivery = deliveries[entry["lease"]]
                delivery.end, delivery.end_time = entry["event"], entry["time"]
    by_uid: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in sorted(deliveries.values(), key=lambda one: one.time):
        groups: dict[str, set[str]] = defaultdict(set)
        for uid, key, advantage, _ in delivery.items:
            assert key == expected[uid][0]
            assert advantage == pytest.approx(expected[uid][1], abs=1e-5)
            assert uid not in groups[key], "delivered twice in one batch"
            groups[key].add(uid)
            by_uid[uid].append(delivery)
        for names in groups.values():
            assert len(names) == GROUP_SIZE or not by_group, "a group is split"
    assert by_uid.keys() == expected.keys()
    for uid, history in by_uid.items():
        check_history(uid, history)
    ends = {delivery.end for delivery in deliveries.values()}
    assert {"acked", "nacked", "forgotten"} <= ends, "the trainers did too little"


def check_history(uid: str, history: list[Delivery]) -> None:
    """One consumer got an experience again only when the lease before had ended without an ack."""
    for before, after in itertools.pairwise(history):
        assert before.end != "acked", f"{uid} was delivered again after its ack"
        given_back = before.end in ("nacking", "nacked") and before.time <= after.time
        expired = after.time >= before.time + LEASE_SECONDS - SLACK_SECONDS
        assert given_back or expired, f"{uid} had two leases at once"
    assert history[-1].end in ("acked", "acking"), f"{uid} was never acknowledged"
