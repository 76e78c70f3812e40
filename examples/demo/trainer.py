"""The training process, one per rank: learns from its part of what is streamed to all of them.

Together the ranks publish policies, save checkpoints, and go on from the last one when they are
started again. All they know of the task comes in the experiences; held-out problems only measure it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import torch

from examples.demo import task, weights
from examples.demo.history import Update, Verdict
from examples.demo.journal import RESUMED, Journal
from examples.demo.learner import Learner, collate
from examples.demo.model import accuracy
from examples.demo.ranks import Ranks
from examples.demo.settings import BUFFER, CLIENT_OPTIONS, CONSUMER, DemoSettings
from experience_buffer import Batch, Client

NUM_HELD_OUT = 300
NUM_JUDGED = 1000
"""Held-out problems that decide, at the end, whether the run succeeded."""
CALL_TIMEOUT_SECONDS = 60.0
"""For how long a call is repeated, and the first batch waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank says of its part of an update."""

    rewards: list[float]
    """Of each experience."""
    staleness: list[int]
    """By how many versions each was behind."""
    is_last: bool
    """Whether this rank was told to end the training; the first one is."""


def run(settings: DemoSettings, rank: int, rendezvous: Path, parent: Connection | None) -> None:
    """Train until the updates are used up or the parent says that it is enough.

    Args:
        settings: The run's.
        rank: Which rank this process is, from 0.
        rendezvous: File by which the ranks of this life find each other.
        parent: Of the first rank. It sends an `Update` at the start and after each update, and a
            `Verdict` at the end; anything that comes back means that it is enough.
    """
    torch.set_num_threads(1)
    with (
        Client(settings.address, timeout=CALL_TIMEOUT_SECONDS, options=CLIENT_OPTIONS) as client,
        Journal(settings.trained_path(rank)) as journal,
        Ranks(rank, settings.num_ranks, rendezvous=rendezvous) as ranks,
    ):
        Trainer(settings, client, journal, ranks, parent).train()


class Trainer:
    """One rank that turns its parts of batches into policy versions, in step with the others."""

    def __init__(
        self,
        settings: DemoSettings,
        client: Client,
        journal: Journal,
        ranks: Ranks,
        parent: Connection | None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._journal = journal
        self._ranks = ranks
        self._parent = parent
        self._learner = Learner(num_updates=settings.num_updates, seed=settings.seed)
        self._held_out = task.held_out_problems(NUM_HELD_OUT, seed=settings.seed)
        self._version = 0
        """Of the policy; also the training step that made it."""

    def train(self) -> None:
        """Go back to the last checkpoint, then stream, learn, publish and acknowledge in turn."""
        settings, ranks = self._settings, self._ranks
        self._resume()
        is_enough = False
        with self._client.stream(
            settings.groups_per_update,
            buffer=BUFFER,
            consumer=CONSUMER,
            prefetch=settings.prefetch,
            rank=ranks.rank,
            world_size=ranks.world_size,
            format="packed",
            first_timeout=CALL_TIMEOUT_SECONDS,
        ) as batches:
            while self._version < settings.num_updates and not is_enough:
                part = self._learn(next(batches))
                # All have acknowledged the batch now.
                parts = ranks.gather(part)
                is_enough = any(part.is_last for part in parts)
                if ranks.is_first:
                    self._report(parts)
                    if self._version % settings.checkpoint_every == 0:
                        self._save()
        if ranks.is_first:
            self._judge()

    def _resume(self) -> None:
        """Load the last checkpoint, and make all that was learned after it come again."""
        state = self._client.state_dict(0, buffer=BUFFER, consumer=CONSUMER)
        checkpoint = weights.load_checkpoint(self._settings.checkpoint_path)
        if checkpoint is not None:
            self._learner.load_state_dict(checkpoint["learner"])
            state = checkpoint["client"]
        self._version = state["step"]
        self._journal.append([f"{self._version} {RESUMED}"])
        if self._ranks.is_first:
            self._client.load_state_dict(state)
            self._publish()
            self._report([])
        # No rank may sample before the buffer is rewound.
        self._ranks.meet()

    def _learn(self, batch: Batch) -> Part:
        """Make one update of this rank's part and the others', publish it, acknowledge the batch.

        Workers may begin new tasks when a batch is acknowledged. They find the policy that it made
        if that is published first, and so no task is begun with an older one than need be.
        """
        packed, version = batch.packed, self._version
        self._learner.update(collate(packed), add_up=self._ranks.add_up)
        self._version = version + 1
        if self._ranks.is_first:
            self._publish()
        self._journal.append(f"{self._version} {uid}" for uid in packed.uids)
        batch.ack(self._version)
        # A batch that was read ahead has aged since the server said how stale it was.
        aged = version - (batch.policy_version or 0)
        return Part(
            rewards=packed.column("reward").tolist(),
            staleness=(packed.column("staleness") + aged).tolist(),
            is_last=self._parent is not None and self._parent.poll(),
        )

    def _save(self) -> None:
        """Write a checkpoint; what led to it is then needed no more."""
        state = self._client.state_dict(self._version, buffer=BUFFER, consumer=CONSUMER)
        content = {"learner": self._learner.state_dict(), "client": state}
        weights.save_checkpoint(content, path=self._settings.checkpoint_path)
        self._client.declare_safe(self._version, buffer=BUFFER, consumer=CONSUMER)

    def _publish(self) -> None:
        path = self._settings.weights_path
        weights.publish(self._learner.policy, version=self._version, path=path)
        self._client.publish_policy_version(self._version, buffer=BUFFER)

    def _report(self, parts: Sequence[Part]) -> None:
        """Send an `Update`; without parts, of a start."""
        rewards = [reward for part in parts for reward in part.rewards]
        staleness = [versions for part in parts for versions in part.staleness]
        is_end = self._version == self._settings.num_updates
        is_evaluated = not parts or is_end or self._version % self._settings.evaluate_every == 0
        self._send(
            Update(
                version=self._version,
                time=time.time(),
                accuracy=self._accuracy(self._held_out) if is_evaluated else None,
                reward=fmean(rewards) if parts else None,
                staleness=fmean(staleness) if parts else None,
                max_staleness=max(staleness) if parts else None,
            )
        )

    def _judge(self) -> None:
        """Send the `Verdict`, on other problems than those that said when it is enough."""
        problems = task.held_out_problems(NUM_JUDGED, seed=self._settings.seed + 1)
        self._send(Verdict(accuracy=self._accuracy(problems), num_problems=NUM_JUDGED))

    def _accuracy(self, problems: list[task.Problem]) -> float:
        return accuracy(self._learner.policy, problems)

    def _send(self, news: Update | Verdict) -> None:
        assert self._parent is not None
        self._parent.send(news)
