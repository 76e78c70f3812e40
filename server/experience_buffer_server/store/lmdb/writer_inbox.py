"""What the owner of a store sends to its writer process: batches, received from the socket.

As long as there is nothing to write, whoever writes receives, too: a batch that comes then is taken
up without one thread waking another, which takes longer than anything else that is done for it. While
much is written, more comes than the socket holds: a second thread receives it then, and goes on until
the first finds nothing to write.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from typing import NamedTuple

from experience_buffer_server.store.lmdb import writer_protocol

MAX_TURN_BYTES = 16 << 20
"""Batches beyond this wait for the next transaction."""
MAX_TURN_BATCHES = 1024
LARGE_TURN_BYTES = 256 * 1024
"""While less than this is written, the socket holds what comes."""
_MAX_WAIT_SECONDS = 3600.0


class Frame(NamedTuple):
    """A batch as it came."""

    document: memoryview
    large: memoryview
    lent_bytes: int
    """What of it lies in the outbox."""

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return len(self.document) + len(self.large) + self.lent_bytes


class Inbox:
    """The batches that have come. Belongs to one thread, but for the one that it starts itself."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = _Stream(connection)
        self._helper = _Helper(self._stream)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has come that is yet to be taken."""
        return not self._stream.frames and not self._poll.poll(0)

    def take(self, timeout_seconds: float) -> tuple[list[Frame], bool]:
        """Wait for a batch and take those behind it; false if they are the last.

        Args:
            timeout_seconds: After this there may be none.
        """
        received = self._stream.frames
        if not received:
            self._helper.stop()
            self._receive(timeout_seconds)
        turn: list[Frame] = []
        num_bytes = 0
        while received and num_bytes < MAX_TURN_BYTES and len(turn) < MAX_TURN_BATCHES:
            turn.append(received.popleft())
            num_bytes += turn[-1].num_bytes
        if num_bytes >= LARGE_TURN_BYTES:
            self._helper.start()
        return turn, self._stream.is_open or bool(received)

    def _receive(self, timeout_seconds: float) -> None:
        """Receive all that is there; wait until there is a batch, whole."""
        timeout_ms = 1e3 * min(max(timeout_seconds, 0.0), _MAX_WAIT_SECONDS)
        num_bytes = 0
        while num_bytes < MAX_TURN_BYTES:
            if count := self._stream.receive():
                num_bytes += count
            elif self._stream.has_news or not self._poll.poll(timeout_ms):
                return

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._helper.close()


class _Stream:
    """Cuts what comes into batches. For one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: deque[Frame] = deque()
        """Whole ones, in order; another thread may take them out."""
        self.is_open = True
        self._header = memoryview(bytearray(writer_protocol.PARTS.size))
        self._document_bytes = self._lent_bytes = 0
        self._body: memoryview | None = None
        """Of the batch whose header has come."""
        self._missing = self._header
        """What is yet to come of the header, or of the body."""

    @property
    def has_news(self) -> bool:
        """Whether a batch is there, or none will ever be."""
        return bool(self.frames) or not self.is_open

    def receive(self) -> int:
        """Receive a part of one batch; how many bytes, 0 where there are none now, or never again."""
        try:
            count = self.connection.recv_into(self._missing, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except ConnectionResetError:
            count = 0
        if not count:
            self.is_open = False
            return 0
        self._missing = self._missing[count:]
        if not self._missing:
            self._go_on()
        return count

    def _go_on(self) -> None:
        """The header, or the body, is there."""
        if self._body is None:
            self._document_bytes, large_bytes, self._lent_bytes = writer_protocol.PARTS.unpack(
                self._header
            )
            self._body = memoryview(bytearray(self._document_bytes + large_bytes))
            self._missing = self._body
            return
        end = self._document_bytes
        self.frames.append(Frame(self._body[:end], self._body[end:], self._lent_bytes))
        self._body, self._missing = None, self._header


class _Helper:
    """The second thread: it receives between `start` and `stop`."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """What has ended its receiving before it was told to stop."""
        self._is_on = False
        self._is_closed = False
        self._begin = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._stopping, self._stop = os.pipe()

    def start(self) -> None:
        """Receive from now on, if the system has a thread for it."""
        if self._is_on:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="receive", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # The socket holds what it can, and the next large turn tries again.
            self._thread = thread
        self._is_on = True
        self._begin.release()

    def stop(self) -> None:
        """Receive no more; what has come of an unfinished batch stays in the stream.

        Raises:
            BaseException: What the thread could not go on after, such as no memory for a batch.
        """
        self._halt()
        if self._failure is not None:
            raise self._failure

    def _halt(self) -> None:
        if self._is_on:
            os.write(self._stop, b"\0")
            self._ended.acquire()
            self._is_on = False

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_closed:
            return
        self._halt()
        self._is_closed = True
        if self._thread is not None:
            self._begin.release()
            self._thread.join()
        os.close(self._stop)
        os.close(self._stopping)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stopping, select.POLLIN)
        poll.register(self._stream.connection, select.POLLIN)
        while True:
            self._begin.acquire()
            if self._is_closed:
                return
            try:
                while not any(fd == self._stopping for fd, _ in poll.poll()):
                    self._stream.receive()
                    if not self._stream.is_open:
                        break
            except BaseException as error:
                self._failure = error  # For who says stop: nobody waits for a thread that is gone.
            # After the end of the stream, too: only who has said stop may go on.
            os.read(self._stopping, 1)
            self._ended.release()
