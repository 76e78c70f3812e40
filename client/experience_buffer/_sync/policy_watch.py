# Generated from _async/policy_watch.py by scripts/generate_sync.py; edit that file.
"""The policy versions of a buffer as an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from experience_buffer._messages.calls import build
from experience_buffer._sync.primitives import Closing, Condition, read
from experience_buffer._sync.reconnecting import Reconnecting
from experience_buffer._transport.settings import OfOneProcess, closed_error
from experience_buffer.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from experience_buffer._sync.connection import Connection

_METHOD: Final = "WatchPolicyVersion"


class PolicyVersions(OfOneProcess, Closing):
    """An endless iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One thread iterates;
    any may close it.
    """

    def __init__(self, client: Connection, buffer: str) -> None:
        self._client = client
        self._request: Any = build(pb.WatchPolicyVersionRequest, buffer=buffer)
        self._stream = Reconnecting(client, _METHOD, "watch of the policy version")
        self._has_seen = False
        self._last: int | None = None
        self._changed = Condition()
        self._closed = False
        self._call: Any = None

    def __repr__(self) -> str:
        last = "none yet" if self._last is None else self._last
        state = "closed" if self._closed else f"last seen: {last}"
        return f"<{type(self).__name__} of {self._request.buffer!r} at {self._client.address}: {state}>"

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
            is_waiting = True
            try:
                while (response := read(call)) is not None:
                    if self._is_news(response):
                        is_waiting = False
                        return self._last
                error = self._stream.ended()
            except grpc.RpcError as rpc_error:
                error = self._stream.broken(rpc_error)
            finally:
                # Also when who waits gives up, as by a timeout around this: it begins anew next time.
                if is_waiting:
                    call.cancel()
                    self._call = None
            if self._client._is_closed:
                error = closed_error("client")
            with self._changed:
                if not self._closed:
                    delay = self._stream.delay_after(error)
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
                self._call = self._client._open(_METHOD, self._request)
            return self._call

    def _is_news(self, response: pb.WatchPolicyVersionResponse) -> bool:
        """Take in a message; False when it repeats the last one, as after a reconnection."""
        self._stream.heard()
        version = response.version if response.HasField("version") else None
        is_news = not self._has_seen or version != self._last
        self._has_seen, self._last = True, version
        return is_news
