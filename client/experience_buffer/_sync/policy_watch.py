# Generated from _async/policy_watch.py by scripts/generate_sync.py; edit that file.
"""The policy versions of a buffer as an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer._sync.primitives import Closing, Condition, read
from experience_buffer._transport.policy_watch import METHOD, WatchedVersions
from experience_buffer._transport.settings import closed_error
from experience_buffer.errors import ExperienceBufferError, UnavailableError

if TYPE_CHECKING:
    from experience_buffer._sync.connection import Connection


class PolicyVersions(Closing):
    """An endless iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One thread iterates;
    any may close it.
    """

    def __init__(self, client: Connection, buffer: str) -> None:
        self._client = client
        self._versions = WatchedVersions(buffer, client.options.retry)
        self._changed = Condition()
        self._closed = False
        self._call: Any = None

    def __iter__(self) -> Iterator[int | None]:
        return self

    def __next__(self) -> int | None:
        """Wait for the next version.

        Raises:
            StopIteration: This was closed.
            ExperienceBufferError: The server ended the call for good, or could not be reached for
                `RetryOptions.reconnect_seconds`.
        """
        while (call := self._get_call()) is not None:
            error: ExperienceBufferError
            is_waiting = True
            try:
                while (response := read(call)) is not None:
                    if self._versions.is_news(response):
                        is_waiting = False
                        return self._versions.last
                error = UnavailableError("the server ended the watch of the policy version")
            except grpc.RpcError as rpc_error:
                error = self._client._translate(rpc_error, METHOD)
            finally:
                # Also when who waits gives up, as by a timeout around this: it begins anew next time.
                if is_waiting:
                    call.cancel()
                    self._call = None
            if self._client._is_closed:
                error = closed_error("client")
            with self._changed:
                if not self._closed:
                    delay = self._versions.delay_after(error)
                    self._changed.wait_for(lambda: self._closed, delay)
        raise StopIteration

    def close(self) -> None:
        """End the call, also while a version is waited for. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._call is not None:
                self._call.cancel()

    def _get_call(self) -> Any:
        """The call, opened if need be; None when this was closed."""
        with self._changed:
            if self._closed:
                return None
            if self._call is None:
                request: Any = self._versions.request
                self._call = self._client._open(METHOD, request)
            return self._call
