"""What one consumer has had: acks by step, and what was tried too often or passed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Reader = dict[str, Any]
"""Settings of a consumer, by the names that a buffer's settings give them."""


@dataclass(eq=False)
class Place:
    reader: Reader
    acks: dict[str, list[int | None]] = field(default_factory=dict)
    """Of each unit by step; None: final."""
    passed: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)
    safe: int | None = None
    last: int | None = None
    gone: list[tuple[int, bool]] = field(default_factory=list)
    """How often it had each unit that has left, and whether that was used up."""

    given_up: set[str] = field(default_factory=set)
    """Units that are here for others only: passed over, or dropped and still held."""

    def consumed(self, unit: str) -> bool:
        enough = self.reader.get("max_times_sampled", 0) if self.reader.get("replay") else 1
        return unit in self.passed or 0 < enough <= len(self.acks.get(unit, ()))

    def retained(self, unit: str) -> list[int]:
        """Steps that a rewind may undo."""
        return [step for step in self.acks.get(unit, ()) if step is not None]

    def is_due(self, unit: str) -> bool:
        """A rewind has brought it back, and it wasn't consumed since."""
        was_acked = unit in self.acks and not self.acks[unit]
        return was_acked and not self.reader.get("replay") and not self.consumed(unit)

    def ack(self, units: Iterable[str], step: int | None) -> None:
        for unit in units:
            self.acks.setdefault(unit, []).append(step)
            # What was acknowledged once doesn't kill its consumer: tries count from the last ack.
            self.tries.pop(unit, None)
        if step is not None:
            self.last = max(step, -1 if self.last is None else self.last)
            keep = self.reader.get("retain_steps", 0)
            if keep and self.last >= keep:
                self.declare_safe(self.last - keep)

    def declare_safe(self, step: int) -> None:
        """A step beyond the last one that was reached stands for that."""
        if self.last is not None:
            step = min(step, self.last)
            self.safe = max(step, -1 if self.safe is None else self.safe)
            for unit, steps in self.acks.items():
                self.acks[unit] = [None if s is not None and s <= step else s for s in steps]

    def rewind(self, step: int) -> None:
        for unit, steps in self.acks.items():
            self.acks[unit] = [s for s in steps if s is None or s <= step]
            if len(self.acks[unit]) < len(steps) and unit in self.passed:
                # It is judged again when its turn comes.
                self.passed.remove(unit)
                self.given_up.discard(unit)
        if self.last is not None and self.last > step:
            self.last = step if step >= 0 else None

    def blame(self, units: Iterable[str]) -> None:
        """A delivery of these ended badly."""
        self.tries.update(units)
        most = self.reader.get("max_deliveries", 0)
        self.quarantined |= {unit for unit in units if 0 < most <= self.tries[unit]}

    def release(self, units: set[str]) -> None:
        self.quarantined -= units
        for unit in units:
            del self.tries[unit]

    def forget(self, units: set[str]) -> None:
        for unit in units:
            self.acks.pop(unit, None)
            self.tries.pop(unit, None)
        self.passed -= units
        self.given_up -= units
        self.quarantined -= units

    def after_removal(self) -> Place:
        """What stays known when the consumer goes: what it has consumed, for good."""
        acks: dict[str, list[int | None]] = {u: [None] * len(s) for u, s in self.acks.items()}
        return Place(self.reader, acks, self.passed, tries=self.tries, given_up=set(self.passed))
