"""What happened in a run: the trainer's updates, the buffer's depth, who was killed. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one policy update was made of; or that the trainer started, from a checkpoint or not."""

    version: int
    """The policy that came of it; 0: the untrained one."""
    time: float
    """Seconds since the Unix epoch."""
    accuracy: float | None
    """On held-out problems, 0 to 1; None where it wasn't measured."""
    reward: float | None = None
    """Mean over the experiences; None for a start, as below."""
    staleness: float | None = None
    """Mean number of versions by which the experiences were behind."""
    max_staleness: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The last policy on problems that decide whether the run succeeded."""

    accuracy: float
    """0 to 1."""
    num_problems: int
    """None of them was ever posed by a worker."""


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
    num_stale: int = 0
    """Experiences that the buffer left out because they were too stale."""
    verdict: Verdict | None = None
    """None before the training has ended."""

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
    def evaluations(self) -> dict[int, float]:
        """Accuracy by policy version, oldest first; not of versions before a checkpoint undid them."""
        found: dict[int, float] = {}
        for update in self.updates:
            if update.accuracy is not None:
                found = {version: a for version, a in found.items() if version < update.version}
                found[update.version] = update.accuracy
        return found

    @property
    def last_accuracy(self) -> float:
        """The newest one measured, 0 to 1."""
        return next(reversed(self.evaluations.values()), 0.0)

    def has_held(self, target: float, *, num_held: int) -> bool:
        """Whether the newest `num_held` evaluations, of as many policies, reach the target."""
        newest = list(self.evaluations.values())[-num_held:]
        return len(newest) == num_held and min(newest) >= target
