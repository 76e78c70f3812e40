"""The store's interface: what is durable, and how it is kept.

A store keeps rows and bytes; it has no opinion on groups, leases or sampling. The owner of a buffer
decides, writes one `WriteBatch` and waits for its commit. Nothing here knows an engine; `engines`
chooses one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from experience_buffer_server.store.batch import WriteBatch as WriteBatch
from experience_buffer_server.store.errors import DamagedRecordError as DamagedRecordError
from experience_buffer_server.store.errors import StoreError as StoreError
from experience_buffer_server.store.errors import StoreFailedError as StoreFailedError
from experience_buffer_server.store.errors import StoreFormatError as StoreFormatError
from experience_buffer_server.store.errors import StoreFullError as StoreFullError
from experience_buffer_server.store.payload import LARGE_PAYLOAD_BYTES as LARGE_PAYLOAD_BYTES
from experience_buffer_server.store.payload import Payload as Payload
from experience_buffer_server.store.payload import Scattered as Scattered
from experience_buffer_server.store.record import OTHER_DIGEST as OTHER_DIGEST
from experience_buffer_server.store.record import Record as Record
from experience_buffer_server.store.record import cut_of as cut_of
from experience_buffer_server.store.rows import LEASES_PER_SECOND as LEASES_PER_SECOND
from experience_buffer_server.store.rows import MAX_KEY_BYTES as MAX_KEY_BYTES
from experience_buffer_server.store.rows import MAX_PRIORITY as MAX_PRIORITY
from experience_buffer_server.store.rows import AdvantageRow as AdvantageRow
from experience_buffer_server.store.rows import BufferRow as BufferRow
from experience_buffer_server.store.rows import ConsumerRow as ConsumerRow
from experience_buffer_server.store.rows import DamagedRows as DamagedRows
from experience_buffer_server.store.rows import Found as Found
from experience_buffer_server.store.rows import GroupRow as GroupRow
from experience_buffer_server.store.rows import LeaseRow as LeaseRow
from experience_buffer_server.store.rows import ProgressRow as ProgressRow
from experience_buffer_server.store.rows import StoredBuffer as StoredBuffer


class Expected(Protocol):
    """Payloads that are read ahead."""

    def close(self) -> None:
        """Those that weren't asked for won't be. Idempotent."""


class Store(Protocol):
    """A durable store with one owner. All methods belong to the owner's event loop thread."""

    def batch(self) -> WriteBatch:
        """Start a batch of changes."""

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """Submit a batch now; the awaitable ends when it is on disk (`durability = "commit"`).

        Batches commit in the order of submission. Several may share one transaction.

        Raises:
            StoreFullError: No room; nothing of this batch is stored, others are not affected.
            StoreFailedError: The store can't go on.
        """

    def ride(self, batch: WriteBatch) -> Awaitable[None]:
        """Commit a small batch together with the next append, while appends come often.

        It makes that append's commit a little longer instead of letting the next one wait for a
        commit of its own. It commits before whatever is submitted later. Without appends it is
        submitted at once, or after a moment.

        Raises:
            StoreFullError: No room, for this batch or for the append; nothing of it is stored.
            StoreFailedError: The store can't go on.
        """

    @property
    def is_taking_in(self) -> bool:
        """Whether experiences are being appended now."""

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads, committed ones only."""

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[Found[AdvantageRow]]:
        """What was computed."""

    def stored(
        self, buffer_id: int, uids: Iterable[str], seqs: Iterable[int]
    ) -> AbstractContextManager[tuple[list[Found[memoryview]], list[Found[AdvantageRow]]]]:
        """Payloads, uncopied, and what was computed, of one state of the store.

        The views end with the block. Nothing else of the store is to be read within it.
        """

    def fetched(self, buffer_id: int, uids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Have in memory, within the block, those of these payloads that are large.

        What reads them there doesn't wait for the disk, which otherwise keeps the event loop. It
        changes nothing else; those that can't be read are told of where they are read.
        """

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Read large payloads ahead of the `fetched` that will ask for them, as far as there is room.

        Args:
            buffer_id: The buffer's.
            payloads: Uid and bytes of each, in the order in which they will be asked for.
        """

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values; None where nothing is remembered, or can be read back.

        What is remembered only shortens the way of repeats; a damaged one is forgotten early.
        """

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads, for a start after damage; it may take seconds."""

    def prune(self, buffer_id: int, before_time: float, *, limit: int = 1000) -> Awaitable[int]:
        """Forget up to `limit` remembered values older than `before_time`; how many were forgotten."""

    def load(self) -> Iterator[StoredBuffer]:
        """Read the state of every buffer, by id; for the start, before the first commit."""

    @property
    def last_buffer_id(self) -> int:
        """Highest id that a buffer was given, also one that is gone; known after `load`."""

    async def close(self) -> None:
        """Finish what was submitted and release the store. Idempotent."""
