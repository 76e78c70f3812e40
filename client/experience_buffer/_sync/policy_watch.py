"""The policy versions of a buffer as an iterator.

Written by hand: a thread that waits is woken by the end of the call, where `_async/policy_watch.py`
tells a cancelled task from a cancelled call, and closing from another thread needs a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer._transport.policy_watch import METHOD, WatchedVersions
from experience_buffer.errors import ExperienceBufferError, UnavailableError

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._sync.connection import Connection


class PolicyVersions:
    """An endless iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One thread iterates;
    any may close it.
    """

    def __init__(self, client: Connection, buffer: str) -> None:
        self._client = client
        self._versions = WatchedVersions(buffer, client.options.retry)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._call: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[int | None]:
        return self

    def __next__(self) -> int | None:
        """Wait for the next version.

        Raises:
            StopIteration: This was closed.
            ExperienceBufferError: The server ended the call for good, or could not be reached for
                `RetryOptions.reconnect_seconds`.
        """
        while not self._closed.is_set():
            error: ExperienceBufferError
            try:
                for response in self._get_call():
                    if self._versions.is_news(response):
                        return self._versions.last
                error = UnavailableError("the server ended the watch of the policy version")
            except grpc.RpcError as rpc_error:
                if self._closed.is_set():
                    break
                error = self._client._translate(rpc_error, METHOD)
            self._call = None
            if not self._closed.is_set():
                self._closed.wait(self._versions.delay_after(error))
        raise StopIteration

    def close(self) -> None:
        """End the call, also while another thread waits for a version. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._call is not None:
                self._call.cancel()

    def _get_call(self) -> Any:
        with self._lock:
            if self._closed.is_set():
                return ()
            if self._call is None:
                request: Any = self._versions.request
                self._call = self._client._open(METHOD, request)
            return self._call
