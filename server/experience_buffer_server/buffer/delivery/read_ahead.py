"""Having large payloads in memory before they are read, since reading them waits for the disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES, Expected, Store


def fetched(
    store: Store, buffer_id: int, entries: Iterable[Entry | None]
) -> AbstractAsyncContextManager[None]:
    """Have the large payloads of experiences in memory within the block."""
    uids = [entry.record.uid for entry in entries if entry is not None and _is_large(entry)]
    return store.fetched(buffer_id, uids) if uids else nullcontext()


class Prefetches:
    """Large payloads of one stream's leases, which are read before these can be sent."""

    def __init__(self, store: Store, state: BufferState) -> None:
        self._store = store
        self._state = state
        self._expected: dict[int, Expected] = {}
        self._is_closed = False

    def begin(self, lease_id: int, units: Iterable[Unit]) -> None:
        """Begin to read what is large of a lease."""
        records = [entry.record for entry in large_entries(self._state, units)]
        if records and not self._is_closed:
            payloads = [(record.uid, record.payload_bytes) for record in records]
            self._expected[lease_id] = self._store.expect(self._state.id, payloads)

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
