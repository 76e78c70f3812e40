"""What a run has done, compared and found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counts:
    acked_pushes: int = 0
    acked_experiences: int = 0
    repeated_pushes: int = 0
    deliveries: int = 0
    large_deliveries: int = 0
    redeliveries: int = 0
    leases: int = 0
    acks: int = 0
    repeated_acks: int = 0
    whole_groups: int = 0
    advantages: int = 0
    deletions: int = 0
    drops: int = 0
    evictions: int = 0
    aged: int = 0
    rewinds: int = 0
    steps: int = 0
    snapshots: int = 0
    verified_rows: int = 0

    def add(self, other: Counts) -> None:
        """Sum up."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class Report:
    counts: Counts = field(default_factory=Counts)
    kills: Counter[str] = field(default_factory=Counter)
    """By victim; those of workers and trainers are beside the servers'."""
    points: Counter[str] = field(default_factory=Counter)
    """Kills by point."""
    missed: Counter[str] = field(default_factory=Counter)
    """Times that a point was not reached; somebody died at a random moment instead."""
    client_kills: Counter[str] = field(default_factory=Counter)
    lost_sectors: Counter[str] = field(default_factory=Counter)
    """What power failures took, by file."""
    problems: list[str] = field(default_factory=list)

    def add(self, other: Report, *, where: str) -> None:
        """Sum up; `where` says what the other one is of."""
        for name in ("kills", "points", "missed", "client_kills", "lost_sectors"):
            getattr(self, name).update(getattr(other, name))
        self.counts.add(other.counts)
        self.problems += [f"{where}: {problem}" for problem in other.problems]
