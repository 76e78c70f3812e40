"""Admission of new tasks by capacity: the buffer's half of pacing rollout workers.

A worker asks before it starts on a group, which reserves its place; the buffer counts what it
holds. What a worker can do alone, with its own counts, is `experience_buffer.pacing`.
"""

from __future__ import annotations

import heapq


class Reservations:
    """Groups that workers have begun and not yet pushed, by key.

    `reserved -> arrived | released | expired`; each of them frees the reservation. A group that
    has arrived is counted where it is stored. Not thread-safe; owned by its buffer.
    """

    def __init__(self) -> None:
        self._expiries: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Each key's expiry, and outdated ones of keys that went or were renewed."""

    def __len__(self) -> int:
        return len(self._expiries)

    def __contains__(self, key: object) -> bool:
        return key in self._expiries

    def reserve(self, key: str, *, now: float, ttl_seconds: float) -> bool:
        """Reserve until `now + ttl_seconds`; one that is there already is renewed.

        Returns:
            Whether it is new: a worker that asks again takes no second place.

        Raises:
            ValueError: `ttl_seconds` is not above 0.
        """
        if not ttl_seconds > 0:
            raise ValueError(f"ttl_seconds is {ttl_seconds}; give more than 0")
        is_new = key not in self._expiries
        self._expiries[key] = now + ttl_seconds
        if len(self._heap) > 2 * len(self._expiries) + 64:
            self._heap = [(expiry, key) for key, expiry in self._expiries.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (now + ttl_seconds, key))
        return is_new

    def arrived(self, key: str) -> bool:
        """End a reservation as the first member of its group was pushed; False: unknown."""
        return self._expiries.pop(key, None) is not None

    def release(self, key: str) -> bool:
        """End a reservation that its worker gave up; False: unknown."""
        return self._expiries.pop(key, None) is not None

    def expire(self, now: float) -> list[str]:
        """End the reservations whose time is up; returns their keys, earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expiry, key = heapq.heappop(self._heap)
            if self._expiries.get(key) == expiry:
                del self._expiries[key]
                expired.append(key)
        return expired


def capacity(
    *,
    max_staleness: int,
    batch_size: int,
    max_running: int,
    num_unconsumed: int,
    num_reserved: int,
) -> int:
    """Return how many groups may be begun now.

        min((max_staleness + 1) * batch_size - num_unconsumed - num_reserved,
            max_running - num_reserved), never negative

    AReaL counts all that was ever accepted: with version v published, groups may begin as long as
    `accepted + running <= (max_staleness + v + 1) * batch_size`. A trainer that consumes
    `batch_size` groups per version has consumed `v * batch_size` of the accepted ones, so that
    `accepted = v * batch_size + num_unconsumed`, which leaves the formula above. Counting what is
    stored, it needs no version, and holds after a restart, an eviction and a rewind as it is.

    A group whose first member has arrived is unconsumed and no longer reserved: it counts in
    `max_running` until then, and in the bound on staleness throughout.

    Args:
        max_staleness: Most versions between the start of a group and training on it; 0 is on-policy.
        batch_size: Groups (or experiences, if they are sampled alone) that the trainer consumes per
            version.
        max_running: Most groups begun and not yet pushed, of all workers together; 0: unbounded.
        num_unconsumed: Groups stored (open, ready or leased) that the pacing consumer hasn't
            acknowledged.
        num_reserved: Groups begun of which nothing has arrived: `len(reservations)`.

    Source: Fu et al. 2025 (arXiv:2505.24298), staleness-aware training; AReaL `StalenessManager`.
    """
    places = (max_staleness + 1) * batch_size - num_unconsumed - num_reserved
    if max_running:
        places = min(places, max_running - num_reserved)
    return max(places, 0)
