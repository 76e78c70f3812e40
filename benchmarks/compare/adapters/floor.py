"""The floor: gRPC and LMDB with nothing between them; see `floor_server`.

The same payloads over the same kind of streams onto the same disk by the same engine as this project's,
and nothing else: about the least that a server in Python of these two takes. It isn't a bound, since it
isn't tuned. A writer encodes groups and sends them in the background; a reader gets their bytes, and
doesn't decode them.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import torch

from benchmarks import experiences
from benchmarks.compare.adapters.floor_server import OPTIONS, head, split
from benchmarks.workload import Received, Size
from experience_buffer import Experience, trxp
from experience_buffer._codec.memory import keep_large_blocks
from experience_buffer._messages.push_split import encode

_MESSAGE_ITEMS: Final = 128
_MESSAGE_BYTES: Final = 4 * 2**20
"""A message is sent when it holds as much of either."""
_PENDING_BYTES: Final = 8 * 2**20
_PENDING_ITEMS: Final = 8
"""At least; of images one alone exceeds the bytes."""
_AHEAD: Final = 3
"""Batches that are asked for before they are needed."""


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run the server."""
    del size
    with subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.floor_server", str(folder), variant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}", {"server": process.pid}
        process.stdin.close()


def writer(address: str, size: Size, writer: int, mode: str) -> StreamWriter:
    """Connect a writer; there is one mode, `stream`."""
    return StreamWriter(address, size, writer, mode)


def reader(address: str, size: Size, mode: str) -> StreamReader:
    """Connect a reader; there is one mode, `stream`."""
    return StreamReader(address, size, mode)


def leave() -> None:
    """Nothing: each writer and reader has its own connection."""


def versions() -> Mapping[str, str]:
    """Nothing that others don't say."""
    return {}


class _Stream:
    """A call that sends what is put, and whose answers a thread or a caller takes."""

    def __init__(self, address: str, mode: str, method: str) -> None:
        keep_large_blocks()
        torch.set_num_threads(1)
        if mode != "stream":
            raise ValueError(f"mode {mode!r}: there is only stream")
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call: Any = self._channel.stream_stream(f"/floor/{method}")
        self._call = call(iter(self._outbox.get, None))

    def close(self) -> None:
        """Disconnect."""
        self._call.cancel()
        self._outbox.put(None)
        self._channel.close()


class StreamWriter(_Stream):
    """Encodes and sends; a thread counts the answers."""

    def __init__(self, address: str, size: Size, writer: int, mode: str) -> None:
        super().__init__(address, mode, "push")
        self._groups = experiences.Groups(size, writer)
        self._size = size
        self._max_pending = max(_PENDING_BYTES, _PENDING_ITEMS * size.num_bytes)
        self._unsent: list[tuple[int, int, Sequence[Any]]] = []
        """Experiences, bytes and pieces of each value."""
        self._sent: deque[tuple[int, int]] = deque()
        """Experiences and bytes of each message that wasn't answered."""
        self._pending_bytes = 0
        self._less = threading.Condition()
        self.num_acked = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def push(self, number: int) -> None:
        """Encode one group; send it with its neighbours."""
        self._add(self._groups.named(number))
        items = sum(count for count, _, _ in self._unsent)
        num_bytes = sum(length for _, length, _ in self._unsent)
        if items >= _MESSAGE_ITEMS or num_bytes >= _MESSAGE_BYTES:
            self._send()

    def push_one(self, number: int) -> None:
        """Send one experience and wait for the answer."""
        group, run = divmod(number, self._size.group_size)
        self._add(self._groups.named(group)[run : run + 1])
        self.flush()

    def flush(self) -> None:
        """Send what is left, and wait for all answers."""
        if self._unsent:
            self._send()
        with self._less:
            self._less.wait_for(lambda: not self._sent)

    def _add(self, group: Sequence[Experience]) -> None:
        pieces = encode(group)
        self._unsent.append((len(group), sum(map(len, pieces)), pieces))

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        start = head((count, length) for count, length, _ in unsent)
        message = b"".join([start, *(piece for _, _, pieces in unsent for piece in pieces)])
        with self._less:
            self._less.wait_for(
                lambda: not self._sent or self._pending_bytes + len(message) <= self._max_pending
            )
            self._sent.append((sum(count for count, _, _ in unsent), len(message)))
            self._pending_bytes += len(message)
        self._outbox.put(message)

    def _receive(self) -> None:
        try:
            for _ in self._call:
                with self._less:
                    count, num_bytes = self._sent.popleft()
                    self.num_acked += count
                    self._pending_bytes -= num_bytes
                    self._less.notify_all()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise


class StreamReader(_Stream):
    """Asks ahead."""

    def __init__(self, address: str, size: Size, mode: str) -> None:
        super().__init__(address, mode, "sample")
        self._wanted = str(size.batch_size).encode()
        self._num_asked = 0

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups."""
        return True

    def sample(self) -> bytes:
        """The next batch."""
        return self._next(_AHEAD)

    def fetch(self) -> bytes:
        """A batch that wasn't asked for before."""
        return self._next(1)

    def settle(self, batch: bytes) -> None:
        """Nothing: what is sent is gone."""

    def unpack(self, batch: bytes) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        return [
            experiences.received(experience)
            for _, value in split(batch)
            for experience in trxp.decode(bytes(value))
        ]

    def _next(self, num_ahead: int) -> bytes:
        while self._num_asked < num_ahead:
            self._num_asked += 1
            self._outbox.put(self._wanted)
        self._num_asked -= 1
        batch: bytes = next(self._call)
        return batch
