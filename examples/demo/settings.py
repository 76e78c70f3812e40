"""What can be set for a run of the demo, and where its files go. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from experience_buffer import ClientOptions, RetryOptions

BUFFER = "demo"
"""Name of the buffer on the server."""
CONSUMER = "trainer"
"""Name of its reader."""
CLIENT_OPTIONS: Final = ClientOptions(retry=RetryOptions(max_backoff_seconds=0.5))
"""A server on this machine is back soon, and nobody else is troubled by frequent attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo; picklable, every process gets it."""

    address: str
    """The server's host:port."""
    folder: Path
    """Where weights, journals, the server's log and its store go."""
    seed: int = 0
    num_updates: int = 280
    """Policy updates at most; the learning rate decays over them."""
    num_workers: int = 2
    num_ranks: int = 2
    """Processes of the trainer; each learns from its part of every batch."""
    groups_per_update: int = 32
    """Groups in a training batch of all ranks; one batch makes one policy version."""
    group_size: int = 8
    """Responses to one problem."""
    max_staleness: int = 2
    """Most policy versions between the one that sampled an experience and the one that learns from
    it, more than `prefetch`; the buffer gives the trainer nothing that would be older."""
    prefetch: int = 1
    """Batches that each rank reads ahead; they age by as many versions until they are used."""
    evaluate_every: int = 10
    """Updates between two evaluations on held-out problems."""
    checkpoint_every: int = 10
    """Updates between two checkpoints."""
    max_seconds: float = 300.0
    """Training ends here even if updates are left."""
    target_accuracy: float = 0.9
    """Share of held-out problems solved in every digit that makes the run a success."""
    num_held: int = 3
    """Evaluations in a row that must reach the target before training ends early."""

    @property
    def groups_per_round(self) -> int:
        """Groups that one worker begins at a time."""
        return self.groups_per_update // self.num_workers

    @property
    def weights_path(self) -> Path:
        """The newest published policy."""
        return self.folder / "weights.pt"

    @property
    def checkpoint_path(self) -> Path:
        """What the trainer resumes from."""
        return self.folder / "checkpoint.pt"

    def trained_path(self, rank: int) -> Path:
        """The journal of one of the trainer's ranks."""
        return self.folder / f"trained-{rank}.txt"

    def acked_path(self, worker: int) -> Path:
        """A worker's journal."""
        return self.folder / f"acked-{worker}.txt"
