"""What can be set for a run of the demo, and where its files go. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUFFER = "demo"
"""Name of the buffer on the server."""
CONSUMER = "trainer"
"""Name of its reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo; picklable, every process gets it."""

    address: str
    """The server's host:port."""
    folder: Path
    """Where weights, journals, the server's log and its store go."""
    seed: int = 0
    num_updates: int = 280
    """Policy updates of the whole run; the learning rate decays over them."""
    num_workers: int = 2
    groups_per_update: int = 32
    """Groups in a training batch; the workers produce this many per policy version together."""
    group_size: int = 8
    """Responses to one problem."""
    max_rounds_ahead: int = 2
    """How many training batches the workers may be ahead of the policy; sets the staleness."""
    evaluate_every: int = 10
    """Updates between two evaluations on held-out problems."""
    max_seconds: float = 200.0
    """Training ends here even if updates are left, counted from the trainer's start."""
    target_accuracy: float = 0.9
    """Exact-match accuracy on held-out problems that makes the run a success."""

    @property
    def groups_per_round(self) -> int:
        """Groups that one worker produces per policy version."""
        return self.groups_per_update // self.num_workers

    @property
    def weights_path(self) -> Path:
        """The newest published policy."""
        return self.folder / "weights.pt"

    @property
    def trained_path(self) -> Path:
        """The trainer's journal."""
        return self.folder / "trained.txt"

    def acked_path(self, worker: int) -> Path:
        """A worker's journal."""
        return self.folder / f"acked-{worker}.txt"
