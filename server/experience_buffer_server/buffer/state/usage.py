"""What came of the experiences of one buffer: used, or gone without ever having been."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """Counts since the server started. Acknowledgements of raw consumers are no use. Not thread-safe."""

    num_used: int = 0
    """Experiences acknowledged for the first time; again when that was undone."""
    num_undone: int = 0
    """Of those, how many are as if never acknowledged: rewound, or it couldn't be stored."""
    num_unused: int = 0
    """Experiences that left without an acknowledgement: dropped, stale, evicted, deleted."""

    @property
    def keep_ratio(self) -> float | None:
        """The part of the experiences that was used; None before the first was or left."""
        kept = self.num_used - self.num_undone
        # A rewind after a restart undoes what was counted before it.
        return max(kept, 0) / total if (total := max(kept, 0) + self.num_unused) else None
