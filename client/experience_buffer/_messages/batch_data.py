"""The content of a delivered batch. Values only: `_sync/batch.py` has those that can be acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experience_buffer._codec.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from experience_buffer.experience import Experience
    from experience_buffer.packed import PackedBatch


class LazyPacked:
    """The bytes of a packed batch, read when first asked for. It can be shared between threads.

    Args:
        data: What is writable is taken over: tensors become views on it. Of bytes a copy is made.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = data
        self._parsed: PackedBatch | None = None
        self._lock = threading.Lock()

    def parse(self) -> PackedBatch:
        """The batch, always the same one.

        Raises:
            TrxpError: The bytes are damaged.
        """
        with self._lock:
            if self._parsed is None:
                from experience_buffer.packed import PackedBatch

                self._parsed = PackedBatch.parse(self._data)
            return self._parsed

    def __reduce__(self) -> tuple[type[LazyPacked], tuple[bytes | bytearray]]:
        data = self._data
        return LazyPacked, (bytearray(data) if isinstance(data, memoryview) else data,)


class LazyPayloads:
    """The payloads of a batch, and the experiences made of them when first asked for.

    It can be shared between threads.

    Args:
        views: The payloads. What is writable is taken over: tensors become views on it. Others keep
            the messages they came in in memory until they are copied.
    """

    def __init__(self, views: Iterable[bytes | memoryview]) -> None:
        self.views: tuple[bytes | memoryview, ...] = tuple(views)
        """The payloads as they are now; nothing is copied."""
        self._experiences: list[Experience] | None = None
        self._lock = threading.Lock()

    def copies(self) -> tuple[bytes, ...]:
        """The payloads, from now on without their messages."""
        with self._lock:
            self.views = copies = tuple(map(bytes, self.views))
            return copies

    def experiences(self) -> list[Experience]:
        """The experiences, always the same ones, in a list of the caller's.

        Raises:
            TrxpError: A payload is damaged.
        """
        with self._lock:
            if self._experiences is None:
                self._experiences = [each for view in self.views for each in _decoded(view)]
            return list(self._experiences)

    def __reduce__(self) -> tuple[type[LazyPayloads], tuple[tuple[bytes, ...]]]:
        return LazyPayloads, (self.copies(),)


def _decoded(payload: bytes | memoryview) -> list[Experience]:
    from experience_buffer import _torch
    from experience_buffer.experience import Experience

    if isinstance(payload, memoryview) and not payload.readonly:
        return _torch.decode_on(payload, Experience, limits=DEFAULT_LIMITS)
    return _torch.decode(payload, Experience, limits=DEFAULT_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class BatchData:
    """A delivered batch: parallel tuples, one entry per experience, groups contiguous.

    Falsy when it holds nothing; `shortfall` then says why. That isn't an error. Nor is a rank's
    part of a shared batch that has fewer units than there are ranks: it has a lease, and is acked
    like any other. The tuples of a packed batch are empty: `packed` has what they would hold.
    """

    buffer: str
    consumer: str
    lease_id: int
    """Names the lease; 0 when nothing was delivered."""
    expire_time: float
    """When the lease expires, by `time.monotonic()`; infinity when nothing was delivered."""
    rank: int | None
    """Whose part of a shared batch this is; None when it isn't shared."""
    world_size: int
    """Ranks that share the batch and its lease; 0 when it isn't shared."""
    uids: tuple[str, ...]
    groups: tuple[str, ...]
    """Each experience's group key; empty texts in ungrouped buffers."""
    content: LazyPayloads
    """What `payloads` and `experiences` are made of."""
    num_deliveries: tuple[int, ...]
    """How often each has been delivered to this consumer, this delivery included."""
    staleness: tuple[int | None, ...]
    """Published policy version minus the version that began the experience; None when unknown."""
    flags: tuple[tuple[str, ...], ...]
    """What each one's advantages are like: "singleton" (nothing to compare with), "zero_variance"
    (all rewards of its group are equal), "masked" (and so its action mask was zeroed), "zero_mask"
    (no token counts), "bootstrapped" (a critic's value stands for what was cut off), "stale" (too
    stale by the consumer's settings, which ask for it all the same)."""
    probabilities: tuple[float, ...]
    """The probability with which each one's unit was chosen when it was; 1 where the order is
    fixed."""
    times_sampled: tuple[int, ...]
    """How often each was delivered to this consumer and acknowledged before."""
    generations: tuple[int, ...]
    """Each one's generation, for `update_priorities`: it changes with every update."""
    columns: LazyPacked | None
    """The content of a packed batch; see `packed`. None of others."""
    num_bytes: int
    """Payload bytes."""
    num_units: int
    """Units (experiences or groups) delivered."""
    shortfall: str
    """Why there are fewer units than asked for; empty when there aren't."""
    policy_version: int | None
    """The newest published policy version; None before the first."""

    def __len__(self) -> int:
        """Return the number of experiences."""
        return len(self.uids) if self.columns is None else len(self.packed)

    def __bool__(self) -> bool:
        return bool(self.num_units)

    def __repr__(self) -> str:
        short = f", shortfall={self.shortfall!r}" if self.shortfall else ""
        rank = f", rank {self.rank} of {self.world_size}" if self.rank is not None else ""
        form = "packed" if self.columns else f"{len(self.uids)} experiences"
        return (
            f"<{type(self).__name__} lease {self.lease_id} of {self.consumer!r} on "
            f"{self.buffer!r}: {form}, {self.num_units} units{rank}{short}>"
        )

    @property
    def payloads(self) -> tuple[bytes, ...]:
        """Each experience as a TRXP payload of its own.

        Take them before you change a tensor in place: some tensors are views on them.
        """
        return self.content.copies()

    @property
    def packed(self) -> PackedBatch:
        """The columns of a batch that was asked for with `format="packed"`; read when first used.

        Raises:
            TrxpError: The batch is damaged.
            ValueError: It holds nothing, or isn't packed.
        """
        if self.columns is None:
            raise ValueError(
                f"{self!r} has no packed columns: ask for them with format='packed', and check "
                "that the batch holds anything"
            )
        return self.columns.parse()

    @property
    def experiences(self) -> list[Experience]:
        """The decoded experiences, in a list of its own; needs torch.

        They are decoded once, and always the same ones; those of a packed batch are made anew each time.
        Each one's tensors share memory, which lives as long as any of them: `clone()` what is to be
        kept for long.

        Raises:
            TrxpError: A payload is damaged.
        """
        if self.columns is not None:
            packed = self.packed
            return [packed.of(index) for index in range(len(packed))]
        return self.content.experiences()
