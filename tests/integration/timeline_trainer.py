"""A trainer to be killed: `python -m tests.integration.timeline_trainer LIFE`, a `Life` in JSON.

The model is the list of groups that it was trained on, so a checkpoint shows what it has learned.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experience_buffer import Batch, Client, ClientOptions, RetryOptions
from tests.journal import Journal

NUM_STEPS: Final = 200
BATCH_GROUPS: Final = 3
GROUP_SIZE: Final = 4
OPTIONS: Final = ClientOptions(
    retry=RetryOptions(initial_backoff_seconds=0.05, max_backoff_seconds=0.2)
)
POINTS: Final = ("sampled", "trained", "acked", "writing", "written", "saved")
"""Where any rank may die: with a batch in hand, before and after its ack, in the middle of a
checkpoint's file, before and after that gets its name."""
FIRST_RANK_POINTS: Final = (*POINTS, "resuming", "resumed", "declaring", "declared")
"""Around a rewind, which is due at once, and around declaring a step safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of one rank: from its start, or its last checkpoint, to its death or the end."""

    address: str
    buffer: str
    folder: str
    """Holds the checkpoints and journals of all ranks."""
    rank: int
    world_size: int
    """1: it samples batches of its own; 2: two ranks share each batch."""
    save_every: int
    """Steps from one checkpoint to the next."""
    keep: int
    """Checkpoints kept; the oldest one's step is declared safe."""
    is_spoiled: bool = False
    """The newest checkpoint can't be read, if there is an older one."""
    death_point: str = ""
    """Where it dies, or at the end if it doesn't get there; empty: it doesn't."""
    death_step: int = 0
    """The first step in which it may."""
    death_delay: float = 0.0
    """Seconds from there to its death; meanwhile it goes on."""


class Death:
    """Comes by SIGKILL at one point of a life."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def at(self, point: str, step: int = NUM_STEPS) -> None:
        """Die if this is the point."""
        life = self._life
        if point != life.death_point or step < life.death_step:
            return
        if life.death_delay:
            threading.Timer(life.death_delay, self._come).start()
        else:
            self._come()

    def at_the_end(self) -> None:
        """Die now, unless this life is to be lived to its end."""
        if self._life.death_point:
            self._come()

    @staticmethod
    def _come() -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Checkpoints:
    """The checkpoints of one rank, each a file that is there whole or not at all."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / f"rank-{rank}"
        self._folder.mkdir(exist_ok=True)

    def steps(self) -> list[int]:
        """Of which steps there is one, ascending."""
        return sorted(int(path.stem) for path in self._folder.glob("*.json"))

    def load(self, step: int) -> dict[str, Any]:
        """What was saved."""
        loaded: dict[str, Any] = json.loads(self._path(step).read_bytes())
        return loaded

    def save(self, step: int, content: dict[str, Any], death: Death) -> None:
        """Write one; it has its name once it is on disk."""
        data, path = json.dumps(content).encode(), self._path(step)
        draft = path.with_suffix(".tmp")
        with draft.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            death.at("writing", step)
            file.write(data[len(data) // 2 :])
            os.fsync(file.fileno())
        death.at("written", step)
        draft.rename(path)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def keep_only(self, steps: Sequence[int]) -> None:
        """Remove all others."""
        for step in set(self.steps()) - set(steps):
            self._path(step).unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:05}.json"


class Barrier:
    """Where two ranks wait for each other; one whose peer has died ends, as with NCCL.

    Args:
        peer: Pipes to write to and to read from; none: there is nobody to wait for.
    """

    def __init__(self, peer: tuple[int, int] | None) -> None:
        self._peer = peer

    def wait(self) -> None:
        """Wait until the other one waits."""
        if self._peer is not None:
            os.write(self._peer[0], b".")
            if not os.read(self._peer[1], 1):
                raise BrokenPipeError("the other rank has ended")


@contextmanager
def barrier_of(life: Life) -> Iterator[Barrier]:
    """Meet the other rank over two named pipes; a pipe opens when both ends do."""
    if life.world_size == 1:
        yield Barrier(None)
        return
    ends: dict[str, int] = {}
    # Both open them in one order.
    for name, writer in (("pipe-0", 0), ("pipe-1", 1)):
        way = os.O_WRONLY if writer == life.rank else os.O_RDONLY
        ends["out" if writer == life.rank else "in"] = os.open(Path(life.folder) / name, way)
    try:
        yield Barrier((ends["out"], ends["in"]))
    finally:
        for end in ends.values():
            os.close(end)


class Trainer:
    """One rank in one life."""

    def __init__(self, life: Life, client: Client, barrier: Barrier) -> None:
        self._life = life
        self._client = client
        self._barrier = barrier
        self._death = Death(life)
        folder = Path(life.folder)
        self._everyones = [Checkpoints(folder, rank) for rank in range(life.world_size)]
        self._checkpoints = self._everyones[life.rank]
        self._journal = Journal(folder / f"journal-{life.rank}")
        self._groups: list[list[str]] = []
        """The model: the groups of each step."""

    def run(self) -> None:
        """Go on from the last checkpoint to the last step."""
        life = self._life
        step = self._resume()
        is_shared = life.world_size > 1
        with self._client.stream(
            BATCH_GROUPS,
            buffer=life.buffer,
            prefetch=2,
            rank=life.rank if is_shared else None,
            world_size=life.world_size if is_shared else None,
        ) as batches:
            while (step := step + 1) < NUM_STEPS:
                self._train(step, next(batches))
                if (step + 1) % life.save_every == 0 or step + 1 == NUM_STEPS:
                    self._save(step)
        self._death.at_the_end()
        self._journal.write("done")

    def _resume(self) -> int:
        """Load the newest checkpoint that all ranks have and go back to it; its step."""
        common = set.intersection(*(set(one.steps()) for one in self._everyones))
        steps = sorted(common)[-self._life.keep :]
        if self._life.is_spoiled and len(steps) > 1:
            steps.pop()
        self._barrier.wait()
        # What is newer belongs to a timeline that ends here.
        self._checkpoints.keep_only(steps)
        state = self._client.state_dict(-1, buffer=self._life.buffer)
        if steps:
            loaded = self._checkpoints.load(steps[-1])
            state, self._groups = loaded["client"], loaded["groups"]
        if self._life.rank == 0:
            self._death.at("resuming")
            self._client.load_state_dict(state)
            self._death.at("resumed")
            self._declare_safe(steps)
        self._journal.write("resumed", step=state["step"])
        self._barrier.wait()
        return int(state["step"])

    def _train(self, step: int, batch: Batch) -> None:
        self._death.at("sampled", step)
        groups = list(dict.fromkeys(batch.groups))
        assert len(batch) == GROUP_SIZE * len(groups), f"a group is split: {batch.groups}"
        self._groups.append(groups)
        self._journal.write("trained", step=step, groups=groups)
        self._death.at("trained", step)
        batch.ack(step)
        self._death.at("acked", step)

    def _save(self, step: int) -> None:
        client_state = self._client.state_dict(step, buffer=self._life.buffer)
        content = {"client": client_state, "groups": self._groups}
        self._checkpoints.save(step, content, self._death)
        self._death.at("saved", step)
        self._barrier.wait()
        keep = 1 if step + 1 == NUM_STEPS else self._life.keep
        steps = self._checkpoints.steps()[-keep:]
        self._checkpoints.keep_only(steps)
        if self._life.rank == 0:
            self._death.at("declaring", step)
            self._declare_safe(steps)
            self._death.at("declared", step)

    def _declare_safe(self, steps: Sequence[int]) -> None:
        """No checkpoint before the oldest that is kept is loaded ever again."""
        if steps:
            self._client.declare_safe(steps[0], buffer=self._life.buffer)


def main() -> None:
    """Live one life; a peer that has ended says itself why."""
    life = Life(**json.loads(sys.argv[1]))
    # That the server is away, which is killed on purpose, is no problem.
    logging.getLogger("experience_buffer").setLevel(logging.ERROR)
    with (
        suppress(BrokenPipeError),
        barrier_of(life) as barrier,
        Client(life.address, options=OPTIONS) as client,
    ):
        Trainer(life, client, barrier).run()


if __name__ == "__main__":
    main()
