"""What happened in a run: the trainer's updates, the buffer's depth, who was killed."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.demo.trainer import Update


@dataclass(slots=True, kw_only=True)
class Kill:
    """A SIGKILL, and how it was overcome."""

    what: str
    """"server" or "trainer"."""
    time: float
    """Seconds since the Unix epoch."""
    version: int
    """The newest policy then."""
    recovery_seconds: float | None = None
    """Until the server served, or the trainer had its checkpoint, again; None before."""
    resumed_version: int = 0
    """Of the trainer: the policy of its checkpoint."""


@dataclass(frozen=True, slots=True)
class Depth:
    """What was in the buffer at a time."""

    time: float
    """Seconds since the Unix epoch."""
    waiting: int
    """Experiences in whole groups that the trainer hasn't acknowledged."""
    retained: int
    """Experiences that it has, and that are kept until a checkpoint is on disk."""


@dataclass(slots=True)
class History:
    """Grows while the demo runs; times are seconds since the Unix epoch."""

    updates: list[Update] = field(default_factory=list)
    depths: list[Depth] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def start_time(self) -> float:
        """When the untrained policy was measured."""
        return self.updates[0].time

    @property
    def seconds(self) -> float:
        """How long the training took."""
        return self.updates[-1].time - self.start_time

    @property
    def version(self) -> int:
        """The newest policy; -1 before the first."""
        return self.updates[-1].version if self.updates else -1

    @property
    def last_accuracy(self) -> float:
        """The newest one measured, 0 to 1."""
        measured = [u.accuracy for u in self.updates if u.accuracy is not None]
        return measured[-1] if measured else 0.0
