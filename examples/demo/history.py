"""What happened in a run: the trainer's updates, the buffer's depth, the server's death."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.demo.trainer import Update


@dataclass(slots=True)
class History:
    """Grows while the demo runs; times are seconds since the Unix epoch."""

    updates: list[Update] = field(default_factory=list)
    depths: list[tuple[float, int]] = field(default_factory=list)
    """(time, experiences stored in the buffer)."""
    kill_time: float | None = None
    """When the server was killed."""
    recovery_seconds: float | None = None
    """From the kill until the server served again."""

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
