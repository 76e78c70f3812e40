"""The content of a delivered batch. Values only: `_sync/batch.py` has those that can be acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from experience_buffer._codec.limits import DEFAULT_LIMITS
from experience_buffer._packed.asked import check_position, uid_of
from experience_buffer._show import counted, line

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
    from experience_buffer import _payloads
    from experience_buffer.experience import Experience

    if isinstance(payload, memoryview) and not payload.readonly:
        return _payloads.decode_on(payload, Experience, limits=DEFAULT_LIMITS)
    return _payloads.decode(payload, Experience, limits=DEFAULT_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class BatchData:
    """The content of a delivered batch; the classes that users meet explain the fields."""

    buffer: str
    consumer: str
    lease_id: int
    expire_time: float
    rank: int | None
    world_size: int
    uids: tuple[str, ...]
    groups: tuple[str, ...]
    content: LazyPayloads
    num_deliveries: tuple[int, ...]
    staleness: tuple[int | None, ...]
    flags: tuple[tuple[str, ...], ...]
    probabilities: tuple[float, ...]
    times_sampled: tuple[int, ...]
    generations: tuple[int, ...]
    columns: LazyPacked | None
    num_bytes: int
    num_units: int
    shortfall: str
    policy_version: int | None

    def __len__(self) -> int:
        """Return the number of experiences."""
        return len(self.uids) if self.columns is None else len(self.packed)

    def __bool__(self) -> bool:
        return bool(self.num_units)

    def __iter__(self) -> Iterator[Experience]:
        return iter(self.experiences if self.columns is None else self.packed)

    def __contains__(self, experience: object) -> bool:
        """Whether it holds an experience, given itself, or by its identity or uid."""
        uid = uid_of(experience)
        return uid in (self.uids if self.columns is None else self.packed.uids)

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> list[Experience]: ...
    def __getitem__(self, index: int | slice) -> Experience | list[Experience]:
        check_position(index)
        found = self.experiences if self.columns is None else self.packed
        return list(found[index]) if isinstance(index, slice) else found[index]

    def __repr__(self) -> str:
        whose = f"of {self.consumer!r} on {self.buffer!r}"
        if not self.lease_id:
            return line(f"<{type(self).__name__} {whose}: nothing; {self.shortfall}>")
        short = f", shortfall={self.shortfall!r}" if self.shortfall else ""
        rank = f", rank {self.rank} of {self.world_size}" if self.rank is not None else ""
        form = "packed" if self.columns else counted(len(self.uids), "experience")
        units = counted(self.num_units, "unit")
        return line(
            f"<{type(self).__name__} lease {self.lease_id} {whose}: {form}, {units}{rank}{short}>"
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
        """The decoded experiences, in a list of its own.

        They are decoded once, and always the same ones; those of a packed batch are made anew each time.
        Each one's tensors share memory, which lives as long as any of them: `clone()` what is to be
        kept for long.

        Raises:
            TrxpError: A payload is damaged.
        """
        if self.columns is not None:
            return list(self.packed)
        return self.content.experiences()
