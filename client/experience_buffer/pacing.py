"""How many rollouts a pool of workers may start: a helper for workers, not tied to the server.

Nothing here starts anything, waits or talks to a server; the pool asks, and tells what happened.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from experience_buffer._arguments import check_whole
from experience_buffer.errors import InvalidRequestError

__all__ = ["RolloutCounts", "RolloutPacer"]
__dir__ = __all__.copy


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """What became of the rollouts that a pacer let start.

    Attributes:
        running: Started and not ended.
        accepted: Ended and used, or to be used, for training; includes those of before a restart.
        rejected: Ended and not used: failed, filtered, discarded.
    """

    running: int
    accepted: int
    rejected: int


class RolloutPacer:
    """Bounds how many rollouts run at once, and how stale they can be when they are trained on.

    It can be shared between threads. Each rollout goes `start -> accept | reject`, and an accepted
    one that no trainer will see goes on to `discard`.

    Each policy version consumes one batch of accepted rollouts. With version v published, rollouts
    start as long as

        accepted + running <= (max_staleness + v + 1) * batch_size

    so a rollout is trained on by version v + max_staleness at the latest, if rollouts reach the
    trainer in the order of their start. One that is overtaken by later ones can be staler: a
    trainer that can't use it has to leave it out by its version, and `discard` it.

    A rejected rollout frees its place. The version is what the trainer has published; a worker
    reads it from its inference engine, or from `client.get_buffer(name).policy_version`.

    Where several pools fill one buffer, give each its share of `batch_size` and its own
    `max_running`.

    Args:
        batch_size: Rollouts that the trainer consumes per version, at least 1.
        max_running: Most rollouts at once, at least 1.
        max_staleness: Most versions between start and training, at least 0; 0 is on-policy.
        version: The version published now. After a restart, not 0: then as many rollouts count as
            accepted as the versions so far have consumed, `version * batch_size`. Without them a
            pacer would let `version * batch_size` stale rollouts start.

    Raises:
        InvalidRequestError: An argument is out of bounds.

    Source: Fu et al. 2025 (arXiv:2505.24298), staleness-aware training; AReaL `StalenessManager`.
    """

    def __init__(
        self, batch_size: int, *, max_running: int, max_staleness: int, version: int = 0
    ) -> None:
        for name, value, minimum in (
            ("batch_size", batch_size, 1),
            ("max_running", max_running, 1),
            ("max_staleness", max_staleness, 0),
            ("version", version, 0),
        ):
            check_whole(name, value, least=minimum)
        self._batch_size = batch_size
        self._max_running = max_running
        self._max_staleness = max_staleness
        self._lock = threading.Lock()
        self._version = version
        self._running = 0
        self._accepted = version * batch_size
        self._rejected = 0

    def __repr__(self) -> str:
        return f"<RolloutPacer at version {self._version}: {self.counts()}>"

    @property
    def max_pending(self) -> int:
        """How many rollouts are worth preparing ahead: `(max_staleness + 1) * batch_size`."""
        return (self._max_staleness + 1) * self._batch_size

    @property
    def version(self) -> int:
        """The version last told."""
        return self._version

    def counts(self) -> RolloutCounts:
        """Return all counts, of one moment."""
        with self._lock:
            return RolloutCounts(
                running=self._running, accepted=self._accepted, rejected=self._rejected
            )

    def capacity(self) -> int:
        """Return how many rollouts `start` would allow now; never negative."""
        with self._lock:
            return self._capacity()

    def start(self, wanted: int = 1) -> int:
        """Take places for rollouts, as far as there are any.

        Asking and taking are one step, so that two threads never get the same place.

        Args:
            wanted: How many would start, at least 0.

        Returns:
            How many may start, 0 to `wanted`. They count as running from now on.

        Raises:
            InvalidRequestError: `wanted` is negative.
        """
        check_whole("wanted", wanted)
        with self._lock:
            started = min(wanted, self._capacity())
            self._running += started
            return started

    def accept(self, count: int = 1) -> None:
        """Say that running rollouts ended and go to the trainer.

        Args:
            count: How many, at least 0.

        Raises:
            InvalidRequestError: Fewer are running.
        """
        with self._lock:
            self._end(count)
            self._accepted += count

    def reject(self, count: int = 1) -> None:
        """Say that running rollouts ended and don't go to the trainer: others may start instead.

        Args:
            count: How many, at least 0.

        Raises:
            InvalidRequestError: Fewer are running.
        """
        with self._lock:
            self._end(count)
            self._rejected += count

    def discard(self, count: int = 1) -> None:
        """Say that accepted rollouts won't be trained on: others may start instead.

        For what a buffer withholds (groups of equal rewards), evicts or lets expire. Unsaid, each
        of them keeps its place for good, and the trainer waits for a batch that can't fill.

        Args:
            count: How many, at least 0.

        Raises:
            InvalidRequestError: Fewer are accepted.
        """
        check_whole("count", count)
        with self._lock:
            if count > self._accepted:
                raise InvalidRequestError(
                    f"{count} rollouts can't be discarded: {self._accepted} accepted",
                    subject="count",
                )
            self._accepted -= count
            self._rejected += count

    def set_version(self, version: int) -> None:
        """Say which version is published; a lower one than before (a rollback) is fine.

        Args:
            version: At least 0.

        Raises:
            InvalidRequestError: It is negative.
        """
        check_whole("version", version)
        with self._lock:
            self._version = version

    def _capacity(self) -> int:
        newest = (self._max_staleness + self._version + 1) * self._batch_size
        places = min(self._max_running - self._running, newest - self._accepted - self._running)
        return max(places, 0)

    def _end(self, count: int) -> None:
        check_whole("count", count)
        if count > self._running:
            raise InvalidRequestError(
                f"{count} rollouts can't end: {self._running} running; start() first",
                subject="count",
            )
        self._running -= count
