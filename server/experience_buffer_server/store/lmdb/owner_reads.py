"""What the owner of a store reads of it, in its own process: rows from the map, large payloads by threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from experience_buffer_server.store.interface import (
    AdvantageRow,
    Found,
    StoredBuffer,
    StoreFailedError,
)
from experience_buffer_server.store.lmdb.large.fetching import Expected, Fetching
from experience_buffer_server.store.lmdb.page_cache import PageCache, major_faults
from experience_buffer_server.store.lmdb.reader import LmdbReader


class OwnerReads:
    """The reading half of `LmdbStore`; see `interface.Store` for the verbs.

    Belongs to one event loop's thread; `reader` can be used from any thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: LmdbReader | None = None
        self._fetching: Fetching | None = None
        self._cache = PageCache()

    def _begin_reading(self) -> None:
        reader = self._reader = LmdbReader(self._path)
        self._fetching = Fetching(reader.places, reader.fetch)
        reader.look_in(self._fetching.find)

    def _end_reading(self) -> None:
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def reader(self) -> LmdbReader:
        """Read access for other threads of this process."""
        if self._reader is None:
            raise StoreFailedError(f"the store at {self._path} is closed")
        return self._reader

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads in the order asked, committed ones only; see `interface.Found`."""
        before = major_faults()
        payloads = self.reader.payloads(buffer_id, uids)
        self._cache.note(major_faults() - before)
        return payloads

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[Found[AdvantageRow]]:
        """What was computed, in the order asked; see `interface.Found`."""
        return self.reader.advantages(buffer_id, seqs)

    @contextmanager
    def stored(
        self, buffer_id: int, uids: Iterable[str], seqs: Iterable[int]
    ) -> Iterator[tuple[list[Found[memoryview]], list[Found[AdvantageRow]]]]:
        """Payloads, uncopied, and what was computed; see `interface.Store.stored`."""
        before = major_faults()
        with self.reader.stored(buffer_id, uids, seqs) as found:
            self._cache.note(major_faults() - before)
            yield found

    @property
    def reads_wait(self) -> bool:
        """Whether reading small rows may wait for the disk now; see `interface.Store.at_hand`."""
        return self._cache.is_cold

    async def at_hand(
        self,
        buffer_id: int,
        *,
        uids: Iterable[str] = (),
        seqs: Iterable[int] = (),
        remembered: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Touch rows in a thread, if they may not be in memory; see `interface.Store.at_hand`."""
        if self._fetching is not None and self._cache.is_cold:
            touch = partial(
                self.reader.touch, buffer_id, [*uids], seqs=[*seqs], remembered=[*remembered]
            )
            with suppress(RuntimeError):  # No thread is left: who reads waits for the disk.
                self._cache.note(await self._fetching.run(touch))

    def fetched(self, buffer_id: int, uids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Have large payloads in memory within the block; see `interface.Store.fetched`."""
        if self._fetching is None:
            raise StoreFailedError(f"the store at {self._path} is closed")
        return self._fetching.fetched(buffer_id, uids)

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Read large payloads ahead; see `interface.Store.expect`."""
        if self._fetching is None:
            raise StoreFailedError(f"the store at {self._path} is closed")
        return self._fetching.expect(buffer_id, payloads)

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values in the order asked; None where nothing is, or can be read back."""
        before = major_faults()
        values = self.reader.recall(buffer_id, kind, keys)
        self._cache.note(major_faults() - before)
        return values

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads, for a start after damage; it may take seconds."""
        return self.reader.payload_uids(buffer_id)

    def load(self, buffer_id: int | None = None) -> Iterator[StoredBuffer]:
        """Read the state of every buffer, by id, or of one; see `interface.Store.load`."""
        return self.reader.load(buffer_id)

    @property
    def damaged(self) -> list[str]:
        """The rows that `load` could not read and left out."""
        return self.reader.damaged

    @property
    def last_buffer_id(self) -> int:
        """Highest id that a buffer was given, also one that is gone; known after `load`."""
        return self.reader.last_buffer_id
