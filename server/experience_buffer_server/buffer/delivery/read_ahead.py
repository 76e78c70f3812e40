"""Having in memory what is read next, since the event loop must not wait for the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES, Expected, Store


def fetched(
    store: Store, buffer_id: int, entries: Iterable[Entry | None]
) -> AbstractAsyncContextManager[None]:
    """Have the large payloads of experiences in memory within the block.

    And all else of them, as long as the store's small rows may not be there.
    """
    if store.reads_wait:
        return _all_of(store, buffer_id, [entry for entry in entries if entry is not None])
    uids = [entry.record.uid for entry in entries if entry is not None and _is_large(entry)]
    return store.fetched(buffer_id, uids) if uids else nullcontext()


@asynccontextmanager
async def _all_of(store: Store, buffer_id: int, entries: Sequence[Entry]) -> AsyncIterator[None]:
    await store.at_hand(
        buffer_id,
        uids=[entry.record.uid for entry in entries if not _is_large(entry)],
        seqs=[entry.record.seq for entry in entries],
    )
    async with store.fetched(buffer_id, [e.record.uid for e in entries if _is_large(e)]):
        yield


def fetched_units(state: BufferState, units: Iterable[Unit]) -> AbstractAsyncContextManager[None]:
    """The same for the experiences of units."""
    if state.store.reads_wait:
        entries = (e for unit in units for e in state.contents.by_seqs(unit.seqs))
        return fetched(state.store, state.id, entries)
    return fetched(state.store, state.id, large_entries(state, units))


class Prefetches:
    """Large payloads of one stream's leases, which are read before these can be sent."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self._expected: dict[int, Expected] = {}
        self._is_closed = False

    def begin(self, lease_id: int, units: Iterable[Unit]) -> None:
        """Begin to read what is large of a lease."""
        records = [entry.record for entry in large_entries(self._state, units)]
        if records and not self._is_closed:
            payloads = [(record.uid, record.payload_bytes) for record in records]
            self._expected[lease_id] = self._state.store.expect(self._state.id, payloads)

    def end(self, lease_id: int) -> None:
        """Nothing more of a lease will be asked for."""
        if (expected := self._expected.pop(lease_id, None)) is not None:
            expected.close()

    def close(self) -> None:
        """Nothing more of any will. Idempotent."""
        self._is_closed = True
        for lease_id in list(self._expected):
            self.end(lease_id)


def large_entries(state: BufferState, units: Iterable[Unit]) -> list[Entry]:
    """The experiences of units whose payloads have to be had from the disk."""
    return [
        entry
        for unit in units
        if unit.num_bytes >= LARGE_PAYLOAD_BYTES
        for entry in state.contents.by_seqs(unit.seqs)
        if _is_large(entry)
    ]


def _is_large(entry: Entry) -> bool:
    return entry.record.payload_bytes >= LARGE_PAYLOAD_BYTES
