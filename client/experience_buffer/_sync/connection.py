"""What the sync client's verbs run on: its channel, and one call with its retries.

Written by hand: here there is a channel per process, in `_async/connection.py` one per event loop.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import grpc

from experience_buffer._messages import calls, fields, push_bytes
from experience_buffer._sync.primitives import Closing
from experience_buffer._transport import channel as _channel
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.settings import GIVE_UP_SECONDS, ClientSettings, closed_error
from experience_buffer.errors import DeadlineExceededError, ExperienceBufferError

T = TypeVar("T")
_INHERITED: Final[list[object]] = []
"""Channels of a parent process: never used here, and never finalised, which could hang."""


class Connection(Closing, ClientSettings):
    """Makes the channel when it is first needed, one per process."""

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._pid = 0
        self._leasing: list[calls.Call[int]] = []
        """What gives up each call under way that leases."""

    def close(self) -> None:
        """Close the connection; calls under way are cancelled. Idempotent."""
        if self._pid == os.getpid():
            for give_up in list(self._leasing):
                self._tell(give_up)
        self._stopped.set()
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
            if channel is not None and self._pid == os.getpid():
                channel.close()

    @property
    def _is_closed(self) -> bool:
        return self._stopped.is_set()

    def _call(
        self,
        method: str,
        parse: Callable[[Any], T],
        *,
        idempotent: bool = True,
        timeout: float | None = None,
        **values: Any,
    ) -> T:
        """Call a method whose request has these fields."""
        call = calls.call_of(method, parse, idempotent=idempotent, **values)
        return self._run(call, timeout)

    def _run(self, call: calls.Call[T], timeout: float | None = None) -> T:
        attempts = Attempts(self._options.retry, self._seconds(timeout))
        while True:
            try:
                answer = self._begin(call.method, call.request, timeout=attempts.remaining())
                self._outage.ended()
                return call.parse(answer)
            except grpc.RpcError as error:
                failure = self._translate(error, call.method)
            except ExperienceBufferError as error:
                failure = error
            delay = self._delay_after(
                failure, attempts, idempotent=call.idempotent, what=fields.verb(call.method)
            )
            if self._stopped.wait(delay):
                raise closed_error("client") from failure

    def _run_unless_given_up(
        self, call: calls.Call[T], give_up: calls.Call[int], timeout: float
    ) -> T:
        """Run a call that leases; where nobody gets its answer, the server is told."""
        self._leasing.append(give_up)
        try:
            return self._run(call, timeout)
        except ExperienceBufferError as error:
            if isinstance(error, DeadlineExceededError):
                self._tell(give_up)
            raise
        except BaseException:
            self._tell(give_up)
            raise
        finally:
            self._leasing.remove(give_up)

    def _tell(self, give_up: calls.Call[int]) -> None:
        """Let the server know of a call that was given up."""
        # Else it has ended with the call, or will at the end of its lease.
        with contextlib.suppress(grpc.RpcError, ExperienceBufferError):
            self._begin(give_up.method, give_up.request, timeout=GIVE_UP_SECONDS)

    def _open(self, method: str, requests: Iterator[Any]) -> Any:
        """Open a stream; without a deadline, since keepalive finds a dead server."""
        return self._begin(method, requests)

    def _begin(self, method: str, request: Any, **options: Any) -> Any:
        stub = self._get_stub()
        try:
            return getattr(stub, method)(request, metadata=self._metadata, **options)
        except ValueError:
            # So gRPC refuses a call on a channel that another thread has closed just now.
            if self._is_closed:
                raise closed_error("client") from None
            raise

    def _get_stub(self) -> Any:
        with self._lock:
            if self._stopped.is_set():
                raise closed_error("client")
            if self._stub is None or self._pid != os.getpid():
                if self._channel is not None:
                    _INHERITED.append(self._channel)
                _channel.note_use()
                arguments = _channel.arguments(self._options, self._tls, target=self._target)
                self._channel = (
                    grpc.insecure_channel(self._target, arguments)
                    if self._tls is None
                    else grpc.secure_channel(
                        self._target, _channel.credentials(self._tls), arguments
                    )
                )
                self._stub = push_bytes.make_stub(self._channel)
                self._pid = os.getpid()
            return self._stub
