"""Training jobs of trainers to be killed, and what they wrote down.

What a trainer does is in `timeline_trainer`.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.timeline_trainer import NUM_STEPS, Checkpoints, Life

LIFE_SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]


class Rank:
    """The lives of one rank, one at a time.

    Args:
        folder: Where all ranks have their checkpoints and journals.
        rank: Which one it is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder
        self._problems = (folder / f"problems-{rank}").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.timeline_trainer"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._problems,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._pid = 0

    def start(self, life: Life) -> None:
        """Begin a life."""
        self._orders.write(json.dumps(asdict(life)).encode() + b"\n")
        self._pid = self._read()

    def wait(self) -> int:
        """Wait for the end of the life; its return code."""
        code, self._pid = self._read(), 0
        return code

    def has_ended(self) -> bool:
        """Whether the life is over."""
        return bool(select.select([self._answers], [], [], 0)[0])

    def kill(self) -> None:
        """End the life from outside."""
        os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> int:
        ready, _, _ = select.select([self._answers], [], [], LIFE_SECONDS)
        assert ready, f"rank {self.rank} is still alive after {LIFE_SECONDS:g} s"
        return int(self._answers.readline())

    def problems(self) -> str:
        """What it has complained of."""
        self._problems.seek(0)
        return self._problems.read().decode()

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What its lives have written down."""
        path = self._folder / f"journal-{self.rank}"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [entry for entry in entries if kind in ("", entry["event"])]

    def timeline(self) -> dict[int, list[str]]:
        """By step, the groups that were trained and not undone by going back."""
        trained: dict[int, list[str]] = {}
        for event in self.events():
            if event["event"] == "resumed":
                trained = {step: trained[step] for step in trained if step <= event["step"]}
            elif event["event"] == "trained":
                assert event["step"] not in trained, "a step was trained twice"
                trained[event["step"]] = event["groups"]
        return trained

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._pid:
            self.kill()
        if self._process.poll() is None:
            self._orders.close()
            self._process.wait()
            self._answers.close()
            self._problems.close()


class Job:
    """A training job of one or two ranks: all live and die together, as torchrun has it.

    Args:
        address: The server's.
        buffer: What it trains on, as "trainer".
        folder: For checkpoints and journals.
    """

    def __init__(self, address: str, buffer: str, folder: Path, *, world_size: int = 1) -> None:
        folder.mkdir()
        for name in ("pipe-0", "pipe-1"):
            os.mkfifo(folder / name)
        self._folder = folder
        self._place: dict[str, Any] = {"address": address, "buffer": buffer, "folder": str(folder)}
        self.ranks = [Rank(folder, rank) for rank in range(world_size)]

    def start(self, *, victim: int = 0, **fields: Any) -> None:
        """Begin a life of all ranks. Those of the fields that say when to die are the victim's."""
        for rank in self.ranks:
            mine = {
                name: value
                for name, value in fields.items()
                if rank.rank == victim or not name.startswith("death")
            }
            life = Life(rank=rank.rank, world_size=len(self.ranks), **self._place, **mine)
            rank.start(life)

    def expect_death(self, victim: int = 0) -> None:
        """Wait for the victim to be killed, and kill the others."""
        code = self.ranks[victim].wait()
        for rank in self.ranks:
            if rank.rank != victim:
                rank.kill()
                rank.wait()
        self._check()
        assert code == -signal.SIGKILL

    def expect_end(self) -> None:
        """Wait until all ranks have trained all steps."""
        codes = [rank.wait() for rank in self.ranks]
        self._check()
        assert codes == [0] * len(self.ranks)

    def _check(self) -> None:
        problems = "".join(rank.problems() for rank in self.ranks)
        assert not problems, problems

    def num_trained(self) -> int:
        """Steps that the first rank has trained in all its lives, those undone included."""
        return len(self.ranks[0].events("trained"))

    def learned(self) -> list[str]:
        """The groups that the last checkpoint has learned from."""
        groups: list[str] = []
        for rank in self.ranks:
            checkpoints = Checkpoints(self._folder, rank.rank)
            assert checkpoints.steps() == [NUM_STEPS - 1]
            model = checkpoints.load(NUM_STEPS - 1)["groups"]
            assert len(model) == NUM_STEPS
            assert dict(enumerate(model)) == rank.timeline()
            groups += itertools.chain.from_iterable(model)
        return groups

    def close(self) -> None:
        """End everything. Idempotent."""
        for rank in self.ranks:
            rank.close()
