"""One consumer's place in a buffer: which units it may have, which are out, and what came of them.

Pure state with its counts, and those of what came of all experiences; who waits for a batch is the business of `offers`, what is chosen that
of `batch_picking`. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from experience_buffer import errors
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.limiter import Counts
from experience_buffer_server.sampling.selectors import Selector
from experience_buffer_server.sampling.tally import Tally
from experience_buffer_server.sampling.timeline import Timeline
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings

_MAX_TIMEOUT_SECONDS = 3600.0
_MAX_BATCH_SIZE = 65_536
"""Units in one batch: choosing them is one step, during which nothing else happens."""
_MAX_LEASE_SECONDS = 7 * 86400


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What one sample call asks for."""

    batch_size: int
    """Units in a full batch."""
    min_batch_size: int
    """Fewest units worth delivering once the timeout has passed."""
    timeout_seconds: float
    lease_seconds: float
    max_bytes: int
    """Most bytes of the batch in a message, unless its first unit alone exceeds them."""


def checked_seconds(settings: BufferSettings, asked: float) -> float:
    """For how long a lease is to hold; 0 asks for the buffer's default.

    Raises:
        InvalidRequestError: It is out of bounds.
    """
    seconds = asked or settings.lease_seconds
    if not 0 < seconds <= _MAX_LEASE_SECONDS:
        raise errors.InvalidRequestError(
            f"lease_seconds {seconds} must lie in (0, {_MAX_LEASE_SECONDS}]",
            subject="lease_seconds",
        )
    return seconds


def checked_want(
    settings: BufferSettings,
    *,
    batch_size: int,
    min_batch_size: int,
    timeout_seconds: float,
    lease_seconds: float,
    max_bytes: int,
) -> Want:
    """What a sample call asks for; 0 as `min_batch_size` asks for full batches.

    Raises:
        InvalidRequestError: A number is out of bounds.
    """
    if batch_size < 1 or min_batch_size > batch_size:
        raise errors.InvalidRequestError(
            f"batch_size {batch_size} must be at least 1, and min_batch_size {min_batch_size} at "
            "most batch_size",
            subject="batch_size",
        )
    if batch_size > _MAX_BATCH_SIZE:
        raise errors.InvalidRequestError(
            f"batch_size {batch_size} is over the limit of {_MAX_BATCH_SIZE} units; sample several "
            "batches",
            subject="batch_size",
        )
    if not timeout_seconds >= 0:
        raise errors.InvalidRequestError(
            f"timeout {timeout_seconds} must be at least 0 seconds", subject="timeout"
        )
    return Want(
        batch_size=batch_size,
        min_batch_size=min_batch_size or batch_size,
        timeout_seconds=min(timeout_seconds, _MAX_TIMEOUT_SECONDS),
        lease_seconds=checked_seconds(settings, lease_seconds),
        max_bytes=max_bytes,
    )


class WaitClock:
    """How long one call has waited, by what kept it. Not thread-safe."""

    def __init__(self, label: str, now: float) -> None:
        self._label = label
        self._since = now
        self._seconds: dict[str, float] = {}

    def look(self, label: str, now: float) -> None:
        """From now on this keeps it."""
        self._seconds[self._label] = self._seconds.get(self._label, 0.0) + now - self._since
        self._label, self._since = label, now

    def until(self, now: float) -> dict[str, float]:
        """The seconds by label."""
        self.look(self._label, now)
        return self._seconds


Cut: TypeAlias = Literal["", "message", "window"]
"""What a batch that is short has too much for: a message, or all that may be leased at once."""


class Taken(NamedTuple):
    """Units of a batch; why there are fewer than asked for, as known before they were taken."""

    units: list[Unit]
    cut_by: Cut = ""
    words: str = ""


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits in line."""

    want: Want
    taken: asyncio.Future[Taken]
    clock: WaitClock
    is_beyond_window: bool
    """The units that were its turn have more experiences than may be leased at once."""
    since: float
    """When it came, by `time.monotonic`."""
    holder: str
    """Who waits: as it calls itself, or its address."""


class Consumer:
    """One consumer of one buffer. Not thread-safe.

    A unit is in one of four places: `ready`, `held` (its policy version isn't published, or known),
    `out` (taken or leased), `quarantined`; or it isn't this consumer's any more.
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self.settings = settings
        self.ready: Selector = settings.selector.make()
        self.held: dict[int, int] = {}
        """Units by number, with the version that they wait for; see `staleness.UNKNOWN_VERSION`."""
        self.out: dict[int, Unit] = {}
        self.quarantined: dict[int, str] = {}
        """Units by number, with the reason."""
        self.finished: set[int] = set()
        """Units by number that it has consumed or passed over and that are still in the buffer."""
        self.asked_batch_size = 0
        """Units of the batch that was asked for last; 0: none was since the start."""
        self.waiters: deque[Waiter] = deque()
        """First come, first served: a large batch is not starved by small ones."""
        self.leases: dict[int, Lease] = {}
        """Its open leases."""
        self.num_leased = 0
        """Units leased, repeats within a batch counted."""
        self.num_leased_experiences = 0
        self.num_leased_bytes = 0
        self.promised: dict[Waiter, list[Unit]] = {}
        """Units given to calls that have waited and haven't leased them yet; they go on at once."""
        self.num_acked = self.num_redelivered = self.num_stale = 0
        """Units since the server started."""
        self.timeline = Timeline()
        self.tally = Tally()
        self.unfit: tuple[int, str] = (0, "")
        """Units of the batch that was tried last and exceeded a bound of what is leased, and which
        bound; until a lease ends. 0: it didn't."""
        self.changed = asyncio.Event()
        """Set, and replaced, when a lease that ranks share was granted or forming one has ended."""
        self.forming = False
        """A call is waiting for the next batch that ranks share."""
        self.closed = False
        """Removed from the buffer."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    @property
    def why_unversioned(self) -> str:
        """Why units without a policy version are held, and what to do."""
        window = "" if self.settings.staleness is None else self.settings.staleness.window
        return (
            f"no policy version is known, by which staleness.{window} is judged; annotate it "
            '(info={"model_version": N}, or versions), or set on_missing_version = "deliver"'
        )

    def has(self, key: int) -> bool:
        """Whether the unit is its, wherever it is."""
        return key in self.ready or key in self.out or key in self.held or key in self.quarantined

    def withdraw(self, key: int) -> None:
        """Don't deliver a unit any more; one that is out is only marked.

        A quarantined one stays quarantined as long as anything of it is in the buffer.
        """
        if key in self.ready:
            self.ready.remove(key)
            self.unfit = (0, "")
        elif key in self.out:
            self.out[key].gone = True
        self.held.pop(key, None)

    def set_aside(self, key: int) -> None:
        """Neither deliver nor count a unit any more: it can't be read. One that is out comes back."""
        if key in self.ready:
            self.ready.remove(key)
            self.unfit = (0, "")
        self.held.pop(key, None)
        if key not in self.finished:
            self.tally.forget(key)

    def take_on(self, settings: ConsumerSettings, values: Iterable[tuple[int, float]]) -> None:
        """Go on with other settings; `values` are the ready units as the new selector needs them."""
        old, self.settings = self.settings, settings
        self.unfit = (0, "")
        if (old.limiter is None) != (settings.limiter is None):
            self.tally = Tally()
        if old.selector != settings.selector:
            ready = settings.selector.make()
            for key, value in values:
                ready.add(key, value)
            self.ready = ready

    @property
    def window_use(self) -> tuple[int, int, int]:
        """Units, experiences and bytes that are leased, or promised to calls that lease them next."""
        units = [unit for promised in self.promised.values() for unit in promised]
        return (
            self.num_leased + len(units),
            self.num_leased_experiences + sum(len(unit.seqs) for unit in units),
            self.num_leased_bytes + sum(unit.num_bytes for unit in units),
        )

    def lent(self, lease: Lease) -> None:
        """A lease's units are out now."""
        self.leases[lease.id] = lease
        self.num_leased += len(lease.units)
        self.num_leased_experiences += lease.num_experiences
        self.num_leased_bytes += lease.num_bytes

    def took_back(self, lease: Lease) -> None:
        """A lease has ended."""
        del self.leases[lease.id]
        self.num_leased -= lease.num_units
        self.num_leased_experiences -= lease.num_experiences
        self.num_leased_bytes -= lease.num_bytes
        self.unfit = (0, "")

    def counts(self, *, num_present: int = 0) -> Counts:
        """For its limiter, without the units that can't be sampled for now: held and quarantined.

        Args:
            num_present: Its units in the buffer that it can get, also those that aren't whole or
                computed yet.
        """
        counts = self.tally.counts(num_present=num_present, finished=self.finished)
        num_idle = len(self.held) + len(self.quarantined)
        limiter, idle_bytes = self.settings.limiter, 0
        if limiter is not None and limiter.plan.max_ahead_bytes:
            # What nobody can sample isn't what a trainer lags behind with.
            idle_bytes = self.tally.ahead_bytes_of(itertools.chain(self.held, self.quarantined))
        return dataclasses.replace(
            counts,
            inserts=max(counts.inserts - num_idle, counts.deletes),
            ahead_bytes=counts.ahead_bytes - idle_bytes,
        )

    def close(self) -> None:
        """Nothing more is delivered to it; calls that wait for it end."""
        self.closed = True
        self.announce()
        for waiter in list(self.waiters):
            waiter.taken.cancel()

    def announce(self) -> None:
        """Wake the ranks that wait for a batch to share."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
