"""What the async client's verbs run on: its channel, and one call with its retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from experience_buffer._async.primitives import Closing, is_cancelling
from experience_buffer._messages import calls, push_bytes
from experience_buffer._transport import channel as _channel
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.settings import ClientSettings, closed_error
from experience_buffer.errors import ExperienceBufferError

T = TypeVar("T")


class AsyncConnection(Closing, ClientSettings):
    """Makes the channel when it is first needed, one per event loop."""

    def _prepare(self) -> None:
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        """Set by `close`, for those who wait in that loop."""
        self._closed = False

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled. Idempotent."""
        self._closed = True
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None and self._loop is asyncio.get_running_loop():
            self._stopped.set()
            await channel.close()

    @property
    def _is_closed(self) -> bool:
        return self._closed

    async def _call(
        self,
        method: str,
        parse: Callable[[Any], T],
        *,
        idempotent: bool = True,
        timeout: float | None = None,
        **fields: Any,
    ) -> T:
        """Call a method whose request has these fields."""
        call = calls.call_of(method, parse, idempotent=idempotent, **fields)
        return await self._run(call, timeout)

    async def _run(self, call: calls.Call[T], timeout: float | None = None) -> T:
        attempts = Attempts(self._options.retry, self._seconds(timeout))
        while True:
            try:
                return call.parse(
                    await getattr(self._get_stub(), call.method)(
                        call.request, timeout=attempts.remaining(), metadata=self._metadata
                    )
                )
            except grpc.RpcError as error:
                failure = self._translate(error, call.method)
            except ExperienceBufferError as error:
                failure = error
            except asyncio.CancelledError:
                # gRPC cancels the waiting task too when the channel is closed.
                if self._closed and not is_cancelling():
                    raise closed_error("client") from None
                raise
            delay = attempts.delay_after(failure, idempotent=call.idempotent)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), delay)
            if self._closed:
                raise closed_error("client") from failure

    def _open(self, method: str, requests: AsyncIterator[Any] | None) -> Any:
        """Open a stream; without a deadline, since keepalive finds a dead server."""
        return getattr(self._get_stub(), method)(requests, metadata=self._metadata)

    def _get_stub(self) -> Any:
        if self._closed:
            raise closed_error("client")
        loop = asyncio.get_running_loop()
        if self._stub is None or self._loop is not loop:
            _channel.note_use()
            arguments = _channel.arguments(self._options, self._tls, target=self._target)
            self._channel = (
                grpc.aio.insecure_channel(self._target, arguments)
                if self._tls is None
                else grpc.aio.secure_channel(
                    self._target, _channel.credentials(self._tls), arguments
                )
            )
            self._stub = push_bytes.make_stub(self._channel)
            self._loop, self._stopped = loop, asyncio.Event()
        return self._stub
