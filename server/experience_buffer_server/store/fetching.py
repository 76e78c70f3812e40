"""Large payloads in memory before they are read, by threads that may wait for the disk."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from experience_buffer_server.store.base import DamagedRecordError, Found
from experience_buffer_server.store.format import Extent

_NUM_THREADS: Final = 4
_MOST_AHEAD_BYTES: Final = 64 << 20
"""Of what is read before anybody has asked for it. A lease has no more of it than is left for others."""
Place: TypeAlias = tuple[bytes, Extent]
"""Key and extent of a payload. The extent's checksum sees to it that nothing else is taken for it."""
_Name: TypeAlias = tuple[int, str]
"""Buffer and uid."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A payload in memory, or why it can't be."""

    place: Place
    payload: memoryview | DamagedRecordError
    memory: ExitStack
    """Gives it back."""


class Fetching:
    """Fetches for one event loop's thread.

    Args:
        read: Reads the payload of a buffer's uid, None if it isn't a large one, or isn't what was
            written; called by other threads.
    """

    def __init__(self, read: Callable[[int, str], Fetched | None]) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="payloads")
        self._held: defaultdict[Place, list[Fetched]] = defaultdict(list)
        self._expected: defaultdict[_Name, list[Expected]] = defaultdict(list)
        """Who expects what nobody has asked for yet."""
        self._ahead_bytes = 0
        self._is_closed = False

    def find(self, place: Place) -> Found[memoryview]:
        """A payload that is in memory, or why it can't be; None: it wasn't asked for."""
        held = self._held.get(place)
        return held[0].payload if held else None

    @asynccontextmanager
    async def fetched(self, buffer_id: int, uids: Iterable[str]) -> AsyncIterator[None]:
        """Have the large ones of these payloads in memory within the block."""
        fetches = [self._asked_for((buffer_id, uid)) for uid in uids]
        held: list[Fetched] = []
        try:
            for fetch in fetches:
                if (found := await fetch.wait()) is not None:
                    held.append(found)
                    self._held[found.place].append(found)
            yield
        finally:
            for found in held:
                self._held[found.place].remove(found)
                if not self._held[found.place]:
                    del self._held[found.place]
            for fetch in fetches:
                fetch.close()

    def _asked_for(self, name: _Name) -> _Fetch:
        return self._expected[name][0].take(name) if name in self._expected else self._begin(name)

    def _begin(self, name: _Name) -> _Fetch:
        loop = asyncio.get_running_loop()
        return _Fetch(loop.run_in_executor(self._threads, self._read, *name))

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Read large payloads ahead that will be asked for, as far as there is room.

        Args:
            buffer_id: The buffer's.
            payloads: Uid and bytes of each, in the order in which they will be asked for.
        """
        return Expected(self, [((buffer_id, uid), num_bytes) for uid, num_bytes in payloads])

    def close(self) -> None:
        """Wait for what is being read, and end the threads. Idempotent."""
        self._is_closed = True
        self._threads.shutdown()


class Expected:
    """The payloads of one lease, which are read ahead.

    Args:
        fetching: Reads them.
        payloads: Name and bytes of each, in the order in which they will be asked for.
    """

    def __init__(self, fetching: Fetching, payloads: Iterable[tuple[_Name, int]]) -> None:
        self._fetching = fetching
        self._left = dict(payloads)
        """Bytes of what isn't being read yet."""
        self._begun: dict[_Name, tuple[_Fetch, int]] = {}
        """With its bytes, what is, or was."""
        self._ahead_bytes = 0
        for name in self._left:
            fetching._expected[name].append(self)
        self._begin()

    def take(self, name: _Name) -> _Fetch:
        """One is asked for, and makes room for the next."""
        fetch = self._begun[name][0] if name in self._begun else self._fetching._begin(name)
        self._forget(name)
        self._begin()
        return fetch

    def _begin(self) -> None:
        fetching = self._fetching
        while self._left and not fetching._is_closed:
            name, num_bytes = next(iter(self._left.items()))
            room = _MOST_AHEAD_BYTES - fetching._ahead_bytes
            if fetching._ahead_bytes and self._ahead_bytes + num_bytes > room:
                return
            del self._left[name]
            self._begun[name] = fetching._begin(name), num_bytes
            fetching._ahead_bytes += num_bytes
            self._ahead_bytes += num_bytes

    def _forget(self, name: _Name) -> None:
        expecting = self._fetching._expected[name]
        expecting.remove(self)
        if not expecting:
            del self._fetching._expected[name]
        self._left.pop(name, None)
        if name in self._begun:
            _, num_bytes = self._begun.pop(name)
            self._ahead_bytes -= num_bytes
            self._fetching._ahead_bytes -= num_bytes

    def close(self) -> None:
        """Those that weren't asked for won't be. Idempotent."""
        fetches = [fetch for fetch, _ in self._begun.values()]
        for name in (*self._left, *self._begun):
            self._forget(name)
        for fetch in fetches:
            fetch.close()


class _Fetch:
    """One payload that is being read, or was."""

    def __init__(self, read: asyncio.Future[Fetched | None]) -> None:
        self._read = read

    async def wait(self) -> Fetched | None:
        """Have it in memory."""
        return await asyncio.shield(self._read)

    def close(self) -> None:
        """Give the memory back, as soon as the disk has answered."""
        self._read.add_done_callback(_release)


def _release(read: asyncio.Future[Fetched | None]) -> None:
    if not read.cancelled() and read.exception() is None and (found := read.result()) is not None:
        found.memory.close()
