"""The units that one consumer may sample, oldest first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Unit:
    """What a consumer gets as one: a single experience or a whole group.

    `waiting -> leased -> waiting` (expired, nacked) or `-> gone` (acknowledged, dropped).
    """

    seqs: tuple[int, ...]
    """Its experiences, ascending; the first one orders the unit."""
    num_bytes: int
    """Payload bytes of its experiences."""
    num_deliveries: int = 0
    """Deliveries so far, the current one included."""
    lease_id: int = 0
    """The lease that holds it; 0: none."""
    waiting: bool = False
    """In the queue; else it is leased, or about to be."""
    gone: bool = False
    """Not to be delivered any more."""

    @property
    def order(self) -> int:
        """Its place in the queue: the seq of its oldest experience."""
        return self.seqs[0]


class ReadyQueue:
    """Units in the order of their oldest experience. Not thread-safe; owned by its buffer."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Unit]] = []
        self._num_pushed = 0
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def push(self, unit: Unit) -> None:
        """Offer a unit; one that comes back takes its old place."""
        unit.waiting = True
        # The number keeps units of one order, of which all but one are gone, from being compared.
        self._num_pushed += 1
        heapq.heappush(self._heap, (unit.order, self._num_pushed, unit))

    def discard(self, unit: Unit) -> None:
        """Mark a waiting unit as gone; it is skipped when its turn comes."""
        unit.gone, unit.waiting = True, False
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def take(self, max_units: int, max_bytes: int) -> list[Unit]:
        """Remove the oldest units: at most `max_units`, and `max_bytes` unless the first exceeds it."""
        taken: list[Unit] = []
        num_bytes = 0
        while self._heap and len(taken) < max_units:
            unit = self._heap[0][-1]
            if unit.gone:
                heapq.heappop(self._heap)
                self._num_gone -= 1
                continue
            num_bytes += unit.num_bytes
            if taken and num_bytes > max_bytes:
                break
            heapq.heappop(self._heap)
            unit.waiting = False
            taken.append(unit)
        return taken
