"""Training jobs of trainers to be killed, and what they wrote down.

What a trainer does is in `timeline_trainer`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.integration.timeline_trainer import NUM_STEPS, Checkpoints, Life
from tests.journal import events
from tests.nursery import ROOT, TRAINER, Forked, nursery

LIFE_SECONDS = 60.0


class Rank:
    """The lives of one rank, one at a time.

    Args:
        folder: Where all ranks have their checkpoints and journals.
        rank: Which one it is.
    """

    process: Forked | subprocess.Popen[Any]

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._journal = folder / f"journal-{rank}"

    def start(self, life: Life) -> None:
        """Begin a life."""
        command = [sys.executable, "-m", TRAINER, json.dumps(asdict(life))]
        self.process = nursery().popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def wait(self) -> int:
        """Wait for the end of the life, which complains of nothing; its return code."""
        code = self.process.wait(LIFE_SECONDS)
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            problems = stderr.read()
        assert not problems, problems
        return code

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """What its lives have written down of a kind."""
        return (entry for entry in events(self._journal) if entry["event"] == kind)

    def timeline(self) -> dict[int, list[str]]:
        """By step, the groups that were trained and not undone by going back."""
        trained: dict[int, list[str]] = {}
        for event in events(self._journal):
            if event["event"] == "resumed":
                trained = {step: trained[step] for step in trained if step <= event["step"]}
            elif event["event"] == "trained":
                assert event["step"] not in trained, "a step was trained twice"
                trained[event["step"]] = event["groups"]
        return trained


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
                rank.process.kill()
                rank.wait()
        assert code == -signal.SIGKILL

    def expect_end(self) -> None:
        """Wait until all ranks have trained all steps."""
        assert [rank.wait() for rank in self.ranks] == [0] * len(self.ranks)

    def num_trained(self) -> int:
        """Steps that the first rank has trained in all its lives, those undone included."""
        return len(list(self.ranks[0].events("trained")))

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
            rank.process.kill()
