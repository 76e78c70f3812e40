"""Large payloads in memory before they are read, by threads that may wait for the disk.

A thread beside a busy event loop waits for the interpreter after whatever it does without it, up to
5 ms. So what lies side by side is read at once, and all else is done in the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, TypeVar

from experience_buffer_server.store.interface import DamagedRecordError, Found, StoreFailedError
from experience_buffer_server.store.lmdb.large.reads import (
    MOST_AT_ONCE_BYTES,
    Place,
    Together,
    side_by_side,
    span_bytes,
)

_T = TypeVar("_T")
_NUM_THREADS: Final = 4
_MOST_AHEAD_BYTES: Final = 64 << 20
"""Of what is read before anybody has asked for it. A lease has no more of it than is left for others."""
_MOST_READS: Final = _MOST_AHEAD_BYTES // MOST_AT_ONCE_BYTES
"""Of at most `MOST_AT_ONCE_BYTES`, begun in one turn for one lease: finding places keeps the event loop."""
_Name: TypeAlias = tuple[int, str]
"""Buffer and uid."""


class Fetching:
    """Fetches for one event loop's thread.

    Args:
        find: Where the payloads of a buffer's uids lie, None for those that aren't large, or whose row
            can't be read; called by the loop's thread.
        read: Reads payloads that lie side by side; called by other threads.
    """

    def __init__(
        self,
        find: Callable[[int, Sequence[str]], Sequence[Place | None]],
        read: Callable[[Sequence[Place]], Together],
    ) -> None:
        self._find_places = find
        self._read = read
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="payloads")
        self._held: defaultdict[Place, list[_Fetch]] = defaultdict(list)
        self._expected: defaultdict[_Name, list[Expected]] = defaultdict(list)
        """Who expects what nobody has asked for yet."""
        self._ahead_bytes = 0
        self._is_closed = False

    def find(self, place: Place) -> Found[memoryview]:
        """A payload that is in memory, or why it can't be; None: it wasn't asked for."""
        held = self._held.get(place)
        return held[0].result() if held else None

    @asynccontextmanager
    async def fetched(self, buffer_id: int, uids: Iterable[str]) -> AsyncIterator[None]:
        """Have the large ones of these payloads in memory within the block."""
        fetches: list[_Fetch] = []
        held: list[_Fetch] = []
        try:
            self._ask_for(buffer_id, uids, fetches)
            for reading in dict.fromkeys(fetch.reading for fetch in fetches):
                await reading.wait()
            for fetch in fetches:
                fetch.result()
                held.append(fetch)
                self._held[fetch.place].append(fetch)
            yield
        finally:
            for fetch in held:
                self._held[fetch.place].remove(fetch)
                if not self._held[fetch.place]:
                    del self._held[fetch.place]
            for fetch in fetches:
                fetch.close()

    def _ask_for(self, buffer_id: int, uids: Iterable[str], fetches: list[_Fetch]) -> None:
        """Take what is read ahead, and begin to read the rest."""
        unread: list[str] = []
        asked: dict[Expected, None] = {}
        for uid in dict.fromkeys(uids):
            fetch = None
            if expecting := self._expected.get((buffer_id, uid)):
                expected = expecting[0]
                asked[expected] = None
                fetch = expected.take(uid)
            if fetch is None:
                unread.append(uid)
            else:
                fetches.append(fetch)
        fetches += self._begin(buffer_id, unread).values()
        for expected in asked:
            expected.go_on()

    def _begin(self, buffer_id: int, uids: Sequence[str]) -> dict[str, _Fetch]:
        """Begin to read what is large of these."""
        if not uids:
            return {}
        names = {
            place: uid
            for uid, place in zip(uids, self._find_places(buffer_id, uids), strict=True)
            if place is not None
        }
        loop = asyncio.get_running_loop()
        fetches: dict[str, _Fetch] = {}
        for neighbours in side_by_side(names):
            found = loop.run_in_executor(self._threads, self._read, neighbours)
            reading = _Reading(found, span_bytes(neighbours), len(neighbours))
            for number, place in enumerate(neighbours):
                fetches[names[place]] = _Fetch(reading, number, place)
        return fetches

    async def run(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, called by a thread that may wait for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def close(self) -> None:
        """Wait for what is being read, and end the threads. Idempotent."""
        self._is_closed = True
        self._threads.shutdown()


class Expected:
    """The payloads of one lease, which are read ahead.

    Args:
        fetching: Reads them.
        buffer_id: The buffer's.
        payloads: Uid and bytes of each, in the order in which they will be asked for.
    """

    def __init__(
        self, fetching: Fetching, buffer_id: int, payloads: Iterable[tuple[str, int]]
    ) -> None:
        self._fetching = fetching
        self._buffer_id = buffer_id
        self._left = dict(payloads)
        """Bytes of what isn't being read yet."""
        self._order = deque(self._left)
        """Those, and some that were taken since."""
        self._begun: dict[str, _Fetch] = {}
        """What is being read, or was."""
        self._ahead_bytes = 0
        for uid in self._left:
            fetching._expected[buffer_id, uid].append(self)
        try:
            self.go_on()
        except BaseException:
            self.close()
            raise

    def take(self, uid: str) -> _Fetch | None:
        """One is asked for; None: it isn't being read. `go_on` follows: there may be room for others."""
        fetch = self._begun.get(uid)
        self._forget(uid)
        return fetch

    def go_on(self) -> None:
        """Read on, as far as there is room."""
        fetching = self._fetching
        for _ in range(_MOST_READS):
            room = _MOST_AHEAD_BYTES - fetching._ahead_bytes - self._ahead_bytes
            if fetching._is_closed or not self._left or (fetching._ahead_bytes and room <= 0):
                return
            uids, num_bytes = self._next()
            if fetching._ahead_bytes and num_bytes > room:
                return
            try:
                begun = fetching._begin(self._buffer_id, uids)
            except StoreFailedError:
                return  # Whoever asks is told.
            for uid in uids:
                del self._left[uid]
                if uid in begun:
                    self._begun[uid] = begun[uid]
                else:
                    self._forget(uid)
            for reading in dict.fromkeys(fetch.reading for fetch in begun.values()):
                self._count(reading.num_bytes)

    def _next(self) -> tuple[list[str], int]:
        """What would be read next, as much as can be at once, and its bytes."""
        while self._order[0] not in self._left:
            self._order.popleft()
        uids: list[str] = []
        total = 0
        for uid in self._order:
            num_bytes = self._left.get(uid)
            if num_bytes is None:
                continue
            if uids and total + num_bytes > MOST_AT_ONCE_BYTES:
                break
            uids.append(uid)
            total += num_bytes
        return uids, total

    def _count(self, num_bytes: int) -> None:
        self._ahead_bytes += num_bytes
        self._fetching._ahead_bytes += num_bytes

    def _forget(self, uid: str) -> None:
        expecting = self._fetching._expected[self._buffer_id, uid]
        expecting.remove(self)
        if not expecting:
            del self._fetching._expected[self._buffer_id, uid]
        self._left.pop(uid, None)
        fetch = self._begun.pop(uid, None)
        if fetch is not None and fetch.reading.take_one():
            self._count(-fetch.reading.num_bytes)

    def close(self) -> None:
        """Those that weren't asked for won't be. Idempotent."""
        fetches = list(self._begun.values())
        for uid in (*self._left, *self._begun):
            self._forget(uid)
        for fetch in fetches:
            fetch.close()


class _Reading:
    """Payloads side by side that are being read, or were.

    Args:
        found: They, once they are in memory.
        num_bytes: What is read: kept as long as one of them is.
        num_payloads: How many they are.
    """

    def __init__(self, found: asyncio.Future[Together], num_bytes: int, num_payloads: int) -> None:
        self.found = found
        self.num_bytes = num_bytes
        self._num_left = num_payloads

    def take_one(self) -> bool:
        """One that was read ahead is asked for, or won't be; whether it was the last one."""
        self._num_left -= 1
        return not self._num_left

    async def wait(self) -> None:
        """Have them in memory."""
        if not self.found.done():
            await asyncio.shield(self.found)


class _Fetch:
    """One payload of those that are read at once."""

    def __init__(self, reading: _Reading, number: int, place: Place) -> None:
        self.reading = reading
        self._number = number
        self.place = place

    def result(self) -> memoryview | DamagedRecordError:
        """The payload; it is in memory."""
        return self.reading.found.result().payloads[self._number]

    def close(self) -> None:
        """Give the memory back, as soon as the disk has answered."""
        if self.reading.found.done():
            self._release(self.reading.found)
        else:
            self.reading.found.add_done_callback(self._release)

    def _release(self, found: asyncio.Future[Together]) -> None:
        if not found.cancelled() and found.exception() is None:
            found.result().release(self._number)
