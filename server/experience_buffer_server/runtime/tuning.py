"""What depends on the machine's speed: how much is done in one go, while nobody else is answered.

All of it stands here; `fit` brings it into line with the machine, once, at the start. What bounds
clients, and what belongs to a format or a protocol, doesn't depend on the machine and stands elsewhere.
Belongs to the event loop.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_REFERENCE_SECONDS: Final = 0.6e-3
"""For `_sample`, on the machine with which the numbers below were found."""
_LEAST, _MOST = 0.25, 4.0
"""Bounds of the factor: what was measured may be wrong."""
_SAMPLES: Final = 5


def _count(default: int) -> Any:
    """Declare how many things are looked at or changed in one go: more on a faster machine."""
    return dataclasses.field(default=default, metadata={"scales": True})


@dataclass(slots=True)
class Tuning:
    """How much is done in one go: some milliseconds of the event loop, or one commit.

    Counts are of experiences, about, unless they say otherwise.
    """

    deleted_at_once: int = _count(2000)
    """Removed with one commit by Delete; of a group all go at once."""
    dropped_at_once: int = _count(2000)
    """Experiences, groups or remembered values of a deleted buffer, removed with one commit: 20 ms."""
    forgotten_at_once: int = _count(1000)
    """Remembered uids that are forgotten in one commit: pushes don't wait for long behind it."""
    aged_looks_per_tick: int = _count(1000)
    """Of each kind, old or outdated, whose units are looked at per tick of the clock."""
    parked_looks_per_tick: int = _count(500)
    """Units that couldn't leave and are looked at again, per tick of the clock."""
    members_per_tick: int = _count(5000)
    """Of the units that are looked at per tick of the clock."""
    leaving_per_tick: int = _count(2000)
    """With which a tick's removals end: pushes don't wait for long behind their commit."""
    vain_looks: int = _count(1000)
    """Of units that can't leave, per call for room: the next call goes on behind them."""
    shed_per_tick: int = _count(1000)
    """Beyond a lowered limit, that leave per tick: pushes don't wait for long behind them."""
    stored_at_once_bytes: int = 32 * 1024
    """Advantages that are stored with one commit, about: what a push may have to wait for."""
    annotated_at_once_bytes: int = 8 * 1024 * 1024
    """Payloads that annotations change with one commit, about."""
    rest: float = 6.0 / (os.cpu_count() or 1)
    """While pushes come in, for how many times as long as it took to store a part of the advantages
    nothing more is stored, and so computed: with few processors everything that runs makes pushes
    wait."""

    def fit(self, speed: float) -> None:
        """Change the counts for a machine that is so many times as fast as that of the defaults."""
        factor = min(max(speed, _LEAST), _MOST)
        for field in dataclasses.fields(self):
            if field.metadata.get("scales"):
                default: Any = field.default
                setattr(self, field.name, max(round(default * factor), 1))


TUNING: Final = Tuning()
"""Of this process."""


def measured_speed(
    clock: Callable[[], float] = time.thread_time, work: Callable[[], object] | None = None
) -> float:
    """How many times as fast this machine is as that of the defaults. Blocks for some 10 ms.

    The best of several counts, in time of this thread: other work on the machine doesn't slow it down.
    """
    work = work or _sample
    best = float("inf")
    for _ in range(_SAMPLES):
        began = clock()
        work()
        best = min(best, clock() - began)
    return _REFERENCE_SECONDS / max(best, 1e-9)


def _sample() -> int:
    """Much as what is done in one go: looking up, comparing, collecting."""
    table = {key: (key, key * 7 % 13) for key in range(5000)}
    return sum(second for first, second in map(table.__getitem__, reversed(table)) if first & 1)
