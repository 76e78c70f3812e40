# Generated from _async/scanning.py by scripts/generate_sync.py; edit that file.
"""What the sync client scans, as an iterator that goes on where a connection broke."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from experience_buffer._messages.scanned import scanned
from experience_buffer._sync.primitives import Closing, Condition, read
from experience_buffer._sync.reconnecting import Reconnecting
from experience_buffer._transport.settings import OfOneProcess, closed_error
from experience_buffer.scanned import ScannedExperience
from experience_buffer.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from experience_buffer._sync.connection import Connection

_METHOD: Final = "Scan"


class Scan(OfOneProcess, Closing):
    """Stored experiences, oldest first, as an iterator; a context manager that ends the call.

    It ends after what was stored when it began. It reconnects when the connection breaks, and goes on
    where it was. One at a time iterates.
    """

    def __init__(
        self,
        client: Connection,
        *,
        buffer: str,
        cursor: str,
        where: Any,
        with_payloads: bool,
        delivered: bool = False,
    ) -> None:
        self._client = client
        self._request: Any = pb.ScanRequest(
            buffer=buffer,
            filter=where,
            cursor=cursor,
            without_payloads=not with_payloads,
            delivered=delivered,
        )
        self._num_taken = 0
        """Of a scan of a training step, which begins anew where the connection broke."""
        self._num_again = 0
        self._stream = Reconnecting(client, _METHOD, "scan")
        self._ready: deque[ScannedExperience] = deque()
        self._cursor = cursor
        self._next_cursor = cursor
        self._progress = 0.0
        self._is_over = False
        self._call: Any = None
        self._changed = Condition()
        self._closed = False

    @property
    def cursor(self) -> str:
        """What a later scan of the buffer takes to go on after what was returned here."""
        return self._cursor

    @property
    def progress(self) -> float:
        """How much of what is to be looked at was, 0 to 1; of scans with a filter, too."""
        return self._progress

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._progress:.0%}"
        return f"<{type(self).__name__} of {self._request.buffer!r} at {self._client.address}: {state}>"

    def __iter__(self) -> Iterator[ScannedExperience]:
        return self

    def __next__(self) -> ScannedExperience:
        """Return the next experience.

        Raises:
            StopIteration: There are no more, or this was closed.
            ExperienceBufferError: The server ended the call for good, or could not be reached for
                `RetryOptions.reconnect_seconds`; a scan from `cursor` goes on.
        """
        while not self._ready and not self._is_over and not self._closed:
            self._receive()
        if not self._ready or self._closed:
            self._cursor = self._cursor if self._closed else self._next_cursor
            raise StopIteration
        found = self._ready.popleft()
        self._cursor = found.cursor
        return found

    def _receive(self) -> None:
        """Take in the next frame."""
        is_received = False
        try:
            if self._call is None:
                self._request.cursor = self._next_cursor
                self._num_again = self._num_taken
                self._call = self._client._open(_METHOD, self._request)
            frame = read(self._call)
            is_received = True
        except grpc.RpcError as error:
            failure = self._stream.broken(error)
        else:
            if frame is not None:
                self._take(frame)
            elif not self._closed:
                self._is_over = True
                self._progress = 1.0
            return
        finally:
            if not is_received and self._call is not None:
                # Also when who waits gives up: it begins anew next time, where it was.
                self._call.cancel()
                self._call = None
        if self._client._is_closed:
            failure = closed_error("client")
        with self._changed:
            if not self._closed:
                delay = self._stream.delay_after(failure)
                self._changed.wait_for(lambda: self._closed, delay)

    def _take(self, frame: pb.ScanResponse) -> None:
        self._stream.heard()
        self._next_cursor, self._progress = frame.cursor, frame.progress
        if self._request.delivered:
            skip = min(self._num_again, len(frame.experiences))
            self._num_again -= skip
            self._num_taken += len(frame.experiences) - skip
            self._ready += map(scanned, frame.experiences[skip:])
        else:
            self._ready += map(scanned, frame.experiences)

    def close(self) -> None:
        """End the call, also while something is waited for. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()
