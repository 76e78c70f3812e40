"""A store in memory: for tests, and for servers of which nothing has to outlive them.

It keeps the contract of `interface.Store` but for durability: what it holds ends with the process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, TypeVar

import msgpack

from experience_buffer_server.store import row_codec
from experience_buffer_server.store.batch import Kind, WriteBatch, check_key, check_remembered
from experience_buffer_server.store.errors import (
    StoreError,
    StoreFailedError,
    StoreFencedError,
    StoreFullError,
)
from experience_buffer_server.store.interface import Expected, StoreStats
from experience_buffer_server.store.record import Interner
from experience_buffer_server.store.rows import (
    AdvantageRow,
    Departed,
    DepartedRow,
    Found,
    LeaseRow,
    StoredBuffer,
    departed_name,
)

_Row = TypeVar("_Row")
_ROW_BYTES: Final = 512
"""What an experience takes beside its payload, about."""


class _Rows:
    """What is kept of one buffer: values by key, by `Kind`."""

    def __init__(self) -> None:
        self.of: dict[int, dict[Any, Any]] = {kind: {} for kind in Kind}
        self.log: list[tuple[float, tuple[str, str]]] = []
        """When each value was remembered, a heap; also those that were remembered again since."""
        self.num_bytes = 0
        """Of payloads and records."""
        self.epoch = 0
        self.number = 0

    def set(self, kind: int, key: Any, value: Any) -> None:
        """Put a row, or remove it where the value is None."""
        if kind == Kind.EXPERIENCE:
            for table in (Kind.RECORD, Kind.PROGRESS, Kind.ADVANTAGES, Kind.MAGNITUDE):
                self.set(table, key, None)
            kind, key, value = Kind.PAYLOAD, value, None
        elif kind in (Kind.DEPARTED, Kind.UID_FREED, Kind.ARCHIVED):
            self._depart(kind, key, *(value if kind == Kind.DEPARTED else (value, b"")))
            return
        elif kind == Kind.NEW_RECORD:
            kind = Kind.RECORD
        elif kind == Kind.REMEMBERED:
            heapq.heappush(self.log, (value[0], key))
        self.num_bytes -= _num_bytes(kind, self.of[kind].pop(key, None))
        if value is not None:
            self.of[kind][key] = value
            self.num_bytes += _num_bytes(kind, value)

    def _depart(self, kind: int, seq: int, uid: str, note: bytes) -> None:
        """What has left: its row, its uid, its end."""
        rows, payloads = self.of[Kind.DEPARTED], self.of[Kind.PAYLOAD]
        if kind == Kind.DEPARTED:
            record = self.of[Kind.RECORD].get(seq)
            progress = self.of[Kind.PROGRESS].pop(seq, b"")
            if record is not None:
                self.set(Kind.RECORD, seq, None)
                rows[seq] = row_codec.encode_departed(note, record, progress)
        elif seq in rows and kind == Kind.UID_FREED:
            if not row_codec.is_uid_freed(rows[seq]) and uid in payloads:
                rows[seq] = row_codec.freed(rows[seq])
                payloads[departed_name(seq)] = payloads.pop(uid)
        elif seq in rows:
            freed = row_codec.is_uid_freed(rows.pop(seq))
            self.set(Kind.PAYLOAD, departed_name(seq) if freed else uid, None)
            for table in (Kind.ADVANTAGES, Kind.MAGNITUDE):
                self.set(table, seq, None)

    def departed(self, seq: int) -> Departed | None:
        """What has left, with its payload and what was computed."""
        if (found := self.of[Kind.DEPARTED].get(seq)) is None:
            return None
        row, computed = row_codec.decode_departed(found), self.of[Kind.ADVANTAGES].get(seq)
        place = departed_name(seq) if row.uid_freed else row.record.uid
        advantages = None if computed is None else row_codec.decode_advantages(computed)
        return Departed(row, self.of[Kind.PAYLOAD].get(place), advantages)

    def forget(self, before_time: float, limit: int) -> int:
        """Forget the oldest values; how many."""
        num_forgotten = 0
        remembered = self.of[Kind.REMEMBERED]
        while self.log and self.log[0][0] < before_time and num_forgotten < limit:
            time, key = heapq.heappop(self.log)
            if key in remembered and remembered[key][0] == time:
                del remembered[key]
                num_forgotten += 1
        return num_forgotten

    def load(self) -> StoredBuffer:
        """All of it but payloads and what was computed."""

        def rows(kind: Kind, decode: Callable[[bytes], _Row]) -> list[_Row]:
            return [decode(row) for _, row in sorted(self.of[kind].items())]

        interner, records = Interner(), rows(Kind.RECORD, row_codec.decode_record)
        for record in records:
            interner.intern(record)
        last_seq = self.of[Kind.LAST_SEQ].get(0, 0)
        return StoredBuffer(
            row=row_codec.decode_buffer(self.of[Kind.BUFFER][0]),
            records=records,
            groups=rows(Kind.GROUP, row_codec.decode_group),
            leases=rows(Kind.LEASE, row_codec.decode_lease),
            progress=rows(Kind.PROGRESS, row_codec.decode_progress),
            consumers=rows(Kind.CONSUMER, row_codec.decode_consumer),
            computed=dict(sorted(self.of[Kind.MAGNITUDE].items())),
            last_seq=max(last_seq, records[-1].seq if records else 0),
        )


class MemoryData:
    """What a store in memory holds; it can be opened again, by the same process."""

    def __init__(self) -> None:
        self.buffers: dict[int, _Rows] = {}
        self.last_buffer_id = 0

    @property
    def num_bytes(self) -> int:
        """Of payloads and records."""
        return sum(rows.num_bytes for rows in self.buffers.values())


class MemoryStore:
    """A store over `MemoryData`; see `interface.Store`. Belongs to one event loop's thread.

    A commit is taken in at once and ends with the loop's next turn.

    Args:
        data: What it holds; None: nothing yet.
        max_bytes: Of payloads and records; appends beyond are refused.
    """

    place = "memory"
    reader_spec: str | None = None
    is_taking_in = False
    pending_bytes = 0
    reads_wait = False

    def __init__(self, data: MemoryData | None = None, *, max_bytes: int = 1 << 40) -> None:
        self.data = MemoryData() if data is None else data
        self.limit_bytes = self.append_limit_bytes = max_bytes
        self.failed = asyncio.Event()
        self.failure: StoreFailedError | None = None
        self.stats = StoreStats()
        self.damaged: list[str] = []
        self._pack = msgpack.Packer().pack
        self._epochs: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        """The last one that was given, by the buffer's id."""
        self._is_closed = False
        self._last_commit: asyncio.Future[Any] | None = None

    def _rows(self, buffer_id: int) -> _Rows:
        return self.data.buffers.get(buffer_id) or _Rows()

    def _end(self, result: Any) -> asyncio.Future[Any]:
        """What ends with the loop's next turn, with a result or an error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def end() -> None:
            if done.done():
                return
            if isinstance(result, StoreError):
                done.set_exception(result)
            else:
                done.set_result(result)

        loop.call_soon(end)
        self._last_commit = done
        return done

    # --- ownership

    def claim(self, buffer_id: int) -> Awaitable[int]:
        """Own a buffer from now on; its new epoch."""
        rows = self.data.buffers.setdefault(buffer_id, _Rows())
        rows.epoch += 1
        self._epochs[buffer_id], self._numbers[buffer_id] = rows.epoch, rows.number
        return self._end(rows.epoch)

    def last_number(self, buffer_id: int) -> Awaitable[int]:
        """The number of the last commit that is stored."""
        return self._end(self._rows(buffer_id).number)

    # --- writing

    def batch(self) -> WriteBatch:
        """Start a batch of changes."""
        return WriteBatch(self._pack)

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        """Take a batch in."""
        for buffer_id in {operation[1] for operation in batch.operations} & self._epochs.keys():
            batch.numbers[buffer_id] = self._numbers[buffer_id] = self._numbers[buffer_id] + 1
        refusal = self._refusal(batch)
        if refusal is None:
            self._apply(batch)
        self.stats.num_full += isinstance(refusal, StoreFullError)
        return self._end(refusal)

    def ride(self, batch: WriteBatch) -> Awaitable[None]:
        """Take a batch in: it keeps no append waiting."""
        if batch.has_appends:
            raise TypeError("a batch without appends is needed; commit this one")
        return self.commit(batch)

    def _refusal(self, batch: WriteBatch) -> StoreError | None:
        """Why nothing of a batch can be stored."""
        if self._is_closed:
            return StoreFailedError("the store in memory is closed")
        for buffer_id, number in batch.numbers.items():
            rows = self._rows(buffer_id)
            if self._epochs[buffer_id] != rows.epoch or number <= rows.number:
                return StoreFencedError(
                    f"buffer {buffer_id} was claimed by another owner: its epoch is {rows.epoch}"
                )
        there: dict[tuple[int, Any], bool] = {}
        """Records that the batch has put or removed so far."""
        emptied: set[int] = set()
        for kind, buffer_id, key, _ in batch.operations:
            if kind == Kind.NEW_RECORD:
                stored = buffer_id not in emptied and key in self._rows(buffer_id).of[Kind.RECORD]
                if there.get((buffer_id, key), stored):
                    return StoreError(f"a number was given twice: {key} of buffer {buffer_id}")
            if kind in (Kind.NEW_RECORD, Kind.RECORD, Kind.EXPERIENCE):
                there[buffer_id, key] = kind != Kind.EXPERIENCE
            elif kind == Kind.WHOLE_BUFFER:
                emptied.add(buffer_id)
                there = {
                    place: is_there for place, is_there in there.items() if place[0] != buffer_id
                }
        if batch.has_appends:
            added = sum(_num_bytes(kind, value) for kind, _, _, value in batch.operations)
            if self.data.num_bytes + added > self.limit_bytes:
                return StoreFullError(
                    f"{self.data.num_bytes} bytes are stored and {added} more would pass the limit of "
                    f"{self.limit_bytes} (store.max_map_bytes); consume or delete experiences, or "
                    "raise it"
                )
        return None

    def _apply(self, batch: WriteBatch) -> None:
        data = self.data
        for kind, buffer_id, key, value in batch.operations:
            if kind == Kind.WHOLE_BUFFER:
                data.buffers.pop(buffer_id, None)
                continue
            rows = data.buffers.get(buffer_id)
            if rows is None:
                rows = data.buffers[buffer_id] = _Rows()
            if kind == Kind.BUFFER:
                data.last_buffer_id = max(data.last_buffer_id, buffer_id)
            rows.set(kind, key, bytes(value) if kind == Kind.PAYLOAD else value)
        for buffer_id, number in batch.numbers.items():
            if buffer_id in data.buffers:
                data.buffers[buffer_id].number = number
        stats = self.stats
        stats.num_transactions += 1
        stats.num_batches += 1
        stats.num_operations += len(batch.operations)
        stats.live_bytes = data.num_bytes
        stats.file_bytes = max(stats.file_bytes, data.num_bytes, 1)

    def prune(self, buffer_id: int, before_time: float, *, limit: int = 1000) -> Awaitable[int]:
        """Forget up to `limit` values remembered before `before_time`, the oldest first."""
        return self._end(self._rows(buffer_id).forget(before_time, limit))

    async def until_short(self) -> None:
        """Nothing waits in front of an append."""

    # --- reading

    def payloads(self, buffer_id: int, uids: Iterable[str]) -> list[Found[bytes]]:
        """The stored payloads."""
        payloads, found = self._rows(buffer_id).of[Kind.PAYLOAD], []
        for uid in uids:
            check_key(uid)
            found.append(payloads.get(uid))
        return found

    def advantages(self, buffer_id: int, seqs: Iterable[int]) -> list[Found[AdvantageRow]]:
        """What was computed."""
        rows = self._rows(buffer_id).of[Kind.ADVANTAGES]
        return [row_codec.decode_advantages(rows[seq]) if seq in rows else None for seq in seqs]

    async def remembered_leases(self, buffer_id: int) -> list[LeaseRow]:
        """All leases that are stored."""
        rows = self._rows(buffer_id).of[Kind.LEASE]
        return [row_codec.decode_lease(rows[lease_id]) for lease_id in sorted(rows)]

    @contextmanager
    def stored(
        self, buffer_id: int, uids: Iterable[str], seqs: Iterable[int]
    ) -> Iterator[tuple[list[Found[memoryview]], list[Found[AdvantageRow]]]]:
        """Payloads and what was computed."""
        payloads = self.payloads(buffer_id, uids)
        views = [memoryview(one) if isinstance(one, bytes) else one for one in payloads]
        yield views, self.advantages(buffer_id, seqs)

    def fetched(self, buffer_id: int, uids: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """They are in memory."""
        return nullcontext()

    async def at_hand(
        self,
        buffer_id: int,
        *,
        uids: Iterable[str] = (),
        seqs: Iterable[int] = (),
        remembered: Iterable[tuple[str, str]] = (),
    ) -> None:
        """It is in memory."""

    def expect(self, buffer_id: int, payloads: Iterable[tuple[str, int]]) -> Expected:
        """Nothing has to be read ahead."""
        return ExitStack()

    def recall(self, buffer_id: int, kind: str, keys: Iterable[str]) -> list[bytes | None]:
        """The remembered values."""
        remembered = self._rows(buffer_id).of[Kind.REMEMBERED]
        values = []
        for key in keys:
            check_remembered(kind, key)
            values.append(remembered.get((kind, key), (0.0, None))[1])
        return values

    def departed(self, buffer_id: int, seqs: Iterable[int]) -> list[Departed]:
        """Those that have left."""
        rows = self._rows(buffer_id)
        return [found for seq in seqs if (found := rows.departed(seq)) is not None]

    def departed_rows(self, buffer_id: int) -> Iterator[tuple[int, Found[DepartedRow]]]:
        """All that has left."""
        rows = self._rows(buffer_id).of[Kind.DEPARTED]
        for seq, row in sorted(rows.items()):
            yield seq, row_codec.decode_departed(row)

    def payload_uids(self, buffer_id: int) -> Iterator[str]:
        """The uids of all stored payloads."""
        return iter(sorted(self._rows(buffer_id).of[Kind.PAYLOAD]))

    # --- the start, and the end

    def load(self, buffer_id: int | None = None) -> Iterator[StoredBuffer]:
        """The state of every buffer, by id, or of one."""
        for id_, rows in sorted(self.data.buffers.items()):
            if buffer_id in (None, id_) and rows.of[Kind.BUFFER]:
                yield rows.load()

    @property
    def last_buffer_id(self) -> int:
        """Highest id that a buffer was given."""
        return self.data.last_buffer_id

    def disk_free_bytes(self) -> int | None:
        """There is no disk."""
        return None

    async def close(self) -> None:
        """Let what was submitted end. Idempotent."""
        self._is_closed = True
        if self._last_commit is not None:
            await asyncio.wait([self._last_commit])


def _num_bytes(kind: int, value: Any) -> int:
    if kind == Kind.PAYLOAD:
        return 0 if value is None else len(value)
    return _ROW_BYTES if kind in (Kind.RECORD, Kind.NEW_RECORD) and value is not None else 0
