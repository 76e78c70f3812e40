"""`python -m benchmarks.compare.adapters.floor_server FOLDER [direct]`: gRPC and LMDB, nothing between.

What is pushed is stored as it comes, unread, and answered when it is on disk; what is sampled is sent
as it was stored, and removed from the disk before that. There are no groups, no uids, no checks, no
leases. With `direct`, values go to a file past the page cache, LMDB says where they are, and nothing
can be sampled. Prints its port, and runs until stdin ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
import struct
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
import lmdb
import uvloop

from experience_buffer_server.runtime.memory import keep_large_blocks

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_MAP_BYTES = 16 * 2**30
_POLL_SECONDS = 0.01
_BOUNCE_BYTES = 4 * 2**20
_BLOCK_BYTES = 4096
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<QQ")
_VALUE = struct.Struct("<II")
Values: TypeAlias = Sequence[tuple[int, memoryview]]
"""How many experiences each holds, and its bytes."""


def head(values: Iterable[tuple[int, int]]) -> bytes:
    """What comes before the values of a message.

    Args:
        values: How many experiences each holds, and how many bytes.
    """
    sizes = [_VALUE.pack(*value) for value in values]
    return _COUNT.pack(len(sizes)) + b"".join(sizes)


def split(message: bytes) -> Values:
    """The values of a message."""
    view = memoryview(message)
    (count,) = _COUNT.unpack_from(message)
    start = _COUNT.size + count * _VALUE.size
    values = []
    for num_experiences, length in _VALUE.iter_unpack(view[_COUNT.size : start]):
        values.append((num_experiences, view[start : start + length]))
        start += length
    return values


class _Work(NamedTuple):
    """What one commit does for one message."""

    puts: Sequence[tuple[bytes, memoryview]]
    removed: Sequence[bytes]
    done: asyncio.Future[None]


class _DirectFile:
    """A file that values are appended to, past the page cache."""

    def __init__(self, folder: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        self._file = os.open(os.path.join(folder, "values"), flags, 0o600)
        self._end = 0
        self._bounce = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))
        """Aligned, as direct writes need it."""

    def append(self, puts: Iterable[tuple[bytes, memoryview]]) -> list[tuple[bytes, bytes]]:
        """Write values, to the disk; by their keys where they are."""
        places, filled = [], 0
        for key, value in puts:
            places.append((key, _PLACE.pack(self._end + filled, len(value))))
            while value:
                count = min(_BOUNCE_BYTES - filled, len(value))
                self._bounce[filled : filled + count] = value[:count]
                filled, value = filled + count, value[count:]
                if filled == _BOUNCE_BYTES:
                    filled = self._write(filled)
        self._write(-(-filled // _BLOCK_BYTES) * _BLOCK_BYTES)
        os.fdatasync(self._file)
        return places

    def _write(self, num_bytes: int) -> int:
        done = 0
        while done < num_bytes:
            done += os.pwrite(self._file, self._bounce[done:num_bytes], self._end + done)
        self._end += num_bytes
        return 0


class _Store:
    """Commits in a thread of its own, all that waits at once."""

    def __init__(self, folder: str, *, is_direct: bool) -> None:
        self.environment = lmdb.open(folder, map_size=_MAP_BYTES)
        self._direct = _DirectFile(folder) if is_direct else None
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def commit(
        self, puts: Sequence[tuple[bytes, memoryview]] = (), removed: Sequence[bytes] = ()
    ) -> asyncio.Future[None]:
        """Done when it is on disk."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._work.put(_Work(puts, removed, done))
        return done

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join()
        self.environment.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            turn = [work]
            while not self._work.empty() and (work := self._work.get()) is not None:
                turn.append(work)
            puts: Iterable[tuple[bytes, bytes | memoryview]] = (p for w in turn for p in w.puts)
            if self._direct is not None:
                puts = self._direct.append(put for each in turn for put in each.puts)
            with self.environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(puts, append=True)
                for each in turn:
                    for key in each.removed:
                        transaction.delete(key)
            self._loop.call_soon_threadsafe(_settle, turn)
            if work is None:
                return


def _settle(turn: Iterable[_Work]) -> None:
    for work in turn:
        if not work.done.done():
            work.done.set_result(None)


class _Servicer:
    """Both calls; every message of a stream is begun when it comes, and answered in order."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._next_key = 0
        self._stored: deque[tuple[bytes, int]] = deque()
        """Keys of what wasn't sampled yet, and how many experiences each holds."""

    async def push(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        """Store the values of each message."""
        async for answer in _answers(requests, self._push):
            yield answer

    async def sample(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        """Send as many experiences as each message says."""
        async for answer in _answers(requests, self._sample):
            yield answer

    async def _push(self, message: bytes) -> bytes:
        puts, keys = [], []
        for num_experiences, value in split(message):
            key = self._next_key.to_bytes(8, "big")
            self._next_key += 1
            puts.append((key, value))
            keys.append((key, num_experiences))
        await self._store.commit(puts)
        self._stored += keys
        return b""

    async def _sample(self, message: bytes) -> bytes:
        wanted = int(message)
        taken: list[tuple[bytes, int]] = []
        while wanted > 0:
            while not self._stored:
                await asyncio.sleep(_POLL_SECONDS)
            taken.append(self._stored.popleft())
            wanted -= taken[-1][1]
        keys = [key for key, _ in taken]
        with self._store.environment.begin(buffers=True) as transaction:
            values = [value for _, value in transaction.cursor().getmulti(keys)]
            sizes = [(count, len(value)) for (_, count), value in zip(taken, values, strict=True)]
            answer = b"".join([head(sizes), *values])
        await self._store.commit(removed=keys)
        return answer


async def _answers(
    requests: AsyncIterator[bytes], begin: Callable[[bytes], Awaitable[bytes]]
) -> AsyncIterator[bytes]:
    begun: asyncio.Queue[asyncio.Future[bytes] | None] = asyncio.Queue()

    async def read() -> None:
        async for request in requests:
            begun.put_nowait(asyncio.ensure_future(begin(request)))
        begun.put_nowait(None)

    reading = asyncio.ensure_future(read())
    try:
        while (answer := await begun.get()) is not None:
            yield await answer
    finally:
        reading.cancel()


async def _serve(folder: str, *, is_direct: bool) -> None:
    store = _Store(folder, is_direct=is_direct)
    servicer = _Servicer(store)
    handlers: dict[str, Any] = {
        behavior.__name__: grpc.stream_stream_rpc_method_handler(behavior)
        for behavior in (servicer.push, servicer.sample)
    }
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    store.close()


if __name__ == "__main__":
    keep_large_blocks()
    uvloop.run(_serve(sys.argv[1], is_direct="direct" in sys.argv[2:]))
