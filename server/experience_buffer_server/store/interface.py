"""The store's interface: what is durable, and how it is kept.

A store keeps rows and bytes; it has no opinion on groups, leases or sampling. The owner of a buffer
decides, writes one `WriteBatch` and waits for its commit. Nothing here knows an engine; `engines`
chooses one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from experience_buffer_server.store.batch import WriteBatch as WriteBatch
from experience_buffer_server.store.errors import DamagedRecordError as DamagedRecordError
from experience_buffer_server.store.errors import StoreError as StoreError
from experience_buffer_server.store.errors import StoreFailedError as StoreFailedError
from experience_buffer_server.store.errors import StoreFencedError as StoreFencedError
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
from experience_buffer_server.store.rows import Departed as Departed
from experience_buffer_server.store.rows import DepartedRow as DepartedRow
from experience_buffer_server.store.rows import Found as Found
from experience_buffer_server.store.rows import GroupRow as GroupRow
from experience_buffer_server.store.rows import LeaseRow as LeaseRow
from experience_buffer_server.store.rows import ProgressRow as ProgressRow
from experience_buffer_server.store.rows import StoredBuffer as StoredBuffer
from experience_buffer_server.store.rows import departed_name as departed_name


@dataclass(slots=True, kw_only=True)
class StoreStats:
    """What was written since the store was opened, and how full it is."""

    num_transactions: int = 0
    num_batches: int = 0
    """Batches that were written; over `num_transactions`, the size of the group commit."""
    num_operations: int = 0
    """Rows put or deleted."""
    num_full: int = 0
    """Batches refused for lack of room."""
    apply_seconds: float = 0.0
    """Time in puts and deletes."""
    commit_seconds: float = 0.0
    """Time in commits: writing and, if durability is "commit", fsync."""
    live_bytes: int = 0
    """What holds rows and payloads; counted every half a second while something is written."""
    file_bytes: int = 0
    """Room that was ever in use; the difference to `live_bytes` can be reused. 0: not known yet."""
    map_bytes: int = 0
    """Address space set aside; 0 where none is."""


class Expected(Protocol):
    """Payloads that are read ahead."""

    def close(self) -> None:
        """Those that weren't asked for won't be. Idempotent."""


class PayloadReader(Protocol):
    """Reads payloads in another process than the owner's."""

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads in the order asked, committed ones only. Blocks."""


class StoreReader(PayloadReader, Protocol):
    """Reads a store in another process than the owner's."""

    def departed(self, buffer_id: int, seqs: Iterable[int]) -> list[Departed]:
        """What has left and isn't archived yet; see `Store.departed`. Blocks."""

    def departed_rows(self, buffer_id: int) -> Iterator[tuple[int, Found[DepartedRow]]]:
        """The same without payloads; see `Store.departed_rows`. Blocks."""


class Store(Protocol):
    """A store, as the owner of buffers has it. All methods belong to its event loop's thread.

    An owner claims a buffer, loads it, keeps all that decides about it in memory, and commits what
    changes. Each engine opens in its own way (`engines`), and raises then: StoreFormatError for what
    isn't its store, StoreFullError where there is no room, StoreFailedError where somebody else has it.

    No verb waits for the disk on the event loop, as long as what is read was asked for by `fetched` or
    `at_hand` before.
    """

    place: str
    """Where it is, for people."""
    reader_spec: str | None
    """What `engines.open_reader` needs in another process; None: nobody else can read it, and payloads
    have to be sent along."""
    limit_bytes: int
    """What it may grow to."""
    append_limit_bytes: int
    """Up to which experiences are appended: the rest is for removing them."""
    failed: asyncio.Event
    """Set when the store can't go on; watch it to shut down. `failure` says why."""
    failure: StoreFailedError | None
    stats: StoreStats

    # --- ownership

    def claim(self, buffer_id: int) -> Awaitable[int]:
        """Own a buffer from now on, stored or not; the awaitable brings its new epoch, from 1.

        Commits of whoever owned it before are refused, however late they come: each carries its
        owner's epoch, and the store compares. Commits to a buffer that was never claimed by this
        engine carry none and aren't compared: only where nobody else can open the store.

        Raises:
            StoreFailedError: The store can't go on.
        """

    def last_number(self, buffer_id: int) -> Awaitable[int]:
        """The number of the last commit that is stored of a claimed buffer; 0: there was none.

        Each commit to it has a number (`WriteBatch.numbers`), in the order of submission, over all
        lives of the store. One whose outcome isn't known is stored if its number isn't above this one:
        none was refused in between without its awaitable having said so. It says what the next start
        will find if durability is "commit" and the store was opened again since; before that, what
        the next reader finds. A number that was refused isn't given again.

        Raises:
            StoreFailedError: The store can't be read.
        """

    # --- writing

    def batch(self) -> WriteBatch:
        """Start a batch of changes."""

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """Submit a batch now; the awaitable ends when it is on disk (`durability = "commit"`).

        Batches commit in the order of submission, each whole or not at all, and are read from then
        on. Several may share one transaction. Submission needs no awaiting, and cancelling who awaits
        does not withdraw it.

        Raises:
            StoreFullError: From the awaitable: no room; nothing of this batch is stored, others are not
                affected. Batches without appends find room where appends don't.
            StoreError: From the awaitable: a seq is taken; nothing of this batch is stored.
            StoreFencedError: From the awaitable: another owner has claimed a buffer of it; nothing of
                this batch is stored.
            StoreFailedError: From the awaitable: the store can't go on; whether the batch is stored,
                `last_number` says.
        """

    def ride(self, batch: WriteBatch) -> Awaitable[None]:
        """Commit a small batch together with the next append, while appends come often.

        It makes that append's commit a little longer instead of letting the next one wait for a
        commit of its own. It commits before whatever is submitted later. Without appends it is
        submitted at once, or after a moment.

        Raises:
            StoreError: As `commit`; also where the append is refused.
            TypeError: The batch has appends.
        """

    def prune(self, buffer_id: int, before_time: float, *, limit: int = 1000) -> Awaitable[int]:
        """Forget up to `limit` remembered values older than `before_time`; how many were forgotten.

        Raises:
            StoreFailedError: The store can't go on.
        """

    @property
    def is_taking_in(self) -> bool:
        """Whether experiences are being appended now."""

    @property
    def pending_bytes(self) -> int:
        """Of the batches that were submitted and have not ended."""

    async def until_short(self) -> None:
        """Wait until an append, submitted now, finds room and keeps no small batch waiting for long."""

    # --- reading: committed rows only, in the order asked

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads; see `fetched` for not waiting for them.

        Raises:
            ValueError: A uid is longer than any that can be stored.
        """

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

    @property
    def reads_wait(self) -> bool:
        """Whether reading small rows may wait for the disk now: `at_hand` is worth its while then."""

    async def at_hand(
        self,
        buffer_id: int,
        *,
        uids: Iterable[str] = (),
        seqs: Iterable[int] = (),
        remembered: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Have what will be read where reading it doesn't wait for the disk, as far as it can be had.

        What follows it reads newer commits, too, without waiting: it changes nothing of what is read.

        Args:
            buffer_id: The buffer's.
            uids: Of `payloads` and `stored`; large payloads are for `fetched`.
            seqs: Of `advantages` and `stored`.
            remembered: Kinds and keys, of `recall`.
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

    def departed(self, buffer_id: int, seqs: Iterable[int]) -> list[Departed]:
        """Of these, those that have left and are neither archived yet nor damaged, with all of it."""

    def departed_rows(self, buffer_id: int) -> Iterator[tuple[int, Found[DepartedRow]]]:
        """All that has left and isn't archived yet, by seq, without payloads; for the start. Blocks."""

    async def remembered_leases(self, buffer_id: int) -> list[LeaseRow]:
        """All leases that are stored, also those that have ended, by id; for looking.

        Raises:
            StoreError: They can't be read.
        """

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads, for a start after damage; it may take seconds."""

    # --- the start, and the end

    def load(self, buffer_id: int | None = None) -> Iterator[StoredBuffer]:
        """Read the state of every buffer, by id, or of one; for their owner, before its first commit.

        A row that can't be read back is left out and named in `damaged`. Blocks; of a million
        experiences for seconds.

        Raises:
            StoreFailedError: The store is damaged so that rows can't all be reached.
        """

    @property
    def damaged(self) -> list[str]:
        """The rows that the last `load` could not read and left out: table, buffer and number of each."""

    @property
    def last_buffer_id(self) -> int:
        """Highest id that a buffer was given, also one that is gone; known after `load`."""

    def disk_free_bytes(self) -> int | None:
        """Free space where it is kept; None where that is no disk. From any thread."""

    async def close(self) -> None:
        """Finish what was submitted and release the store. Idempotent.

        `failure` says afterwards whether the last of it could not be written.
        """


class SnapshotFacts(Protocol):
    """A snapshot that was taken."""

    name: str
    message: str
    num_bytes: int
    num_experiences: int
    create_time: float
    seconds: float
    copy_seconds: float
    removed: list[str]


class Snapshots(Protocol):
    """Takes snapshots of an engine's store, where it has any."""

    async def start(self) -> None:
        """Begin to take them by the clock."""

    async def take(self, label: str = "") -> SnapshotFacts:
        """Take one; see `lmdb.snapshots.snapshots.Snapshots.take` for what it raises."""

    async def close(self) -> None:
        """Give up the one under way. Idempotent."""
