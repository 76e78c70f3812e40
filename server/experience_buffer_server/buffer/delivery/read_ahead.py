"""Having large payloads in memory before they are read, since reading them waits for the disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from experience_buffer_server.buffer.state.contents import Contents
from experience_buffer_server.buffer.state.group_table import Entry
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import LARGE_PAYLOAD_BYTES, Expected, Store


def fetched(
    store: Store, buffer_id: int, entries: Iterable[Entry | None]
) -> AbstractAsyncContextManager[None]:
    """Have the large payloads of experiences in memory within the block."""
    uids = [entry.record.uid for entry in entries if entry is not None and _is_large(entry)]
    return store.fetched(buffer_id, uids) if uids else nullcontext()


def fetched_units(
    store: Store, buffer_id: int, contents: Contents, units: Iterable[Unit]
) -> AbstractAsyncContextManager[None]:
    """Have the large payloads of units in memory within the block."""
    return fetched(store, buffer_id, _large_entries(contents, units))


def fetched_bytes(contents: Contents, units: Iterable[Unit]) -> int:
    """What `fetched_units` has in memory, beside what is made of it."""
    return sum([entry.record.payload_bytes for entry in _large_entries(contents, units)])


class Prefetches:
    """Large payloads of one stream's leases, which are read before these can be sent."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: dict[int, Expected] = {}
        self._is_closed = False

    def begin(
        self, lease_id: int, buffer_id: int, contents: Contents, units: Iterable[Unit]
    ) -> None:
        """Begin to read what is large of a lease."""
        records = [entry.record for entry in _large_entries(contents, units)]
        if records and not self._is_closed:
            payloads = [(record.uid, record.payload_bytes) for record in records]
            self._expected[lease_id] = self._store.expect(buffer_id, payloads)

    def end(self, lease_id: int) -> None:
        """Nothing more of a lease will be asked for."""
        if (expected := self._expected.pop(lease_id, None)) is not None:
            expected.close()

    def close(self) -> None:
        """Nothing more of any will. Idempotent."""
        self._is_closed = True
        for lease_id in list(self._expected):
            self.end(lease_id)


def _large_entries(contents: Contents, units: Iterable[Unit]) -> list[Entry]:
    return [
        entry
        for unit in units
        if unit.num_bytes >= LARGE_PAYLOAD_BYTES
        for entry in contents.by_seqs(unit.seqs)
        if _is_large(entry)
    ]


def _is_large(entry: Entry) -> bool:
    return entry.record.payload_bytes >= LARGE_PAYLOAD_BYTES
