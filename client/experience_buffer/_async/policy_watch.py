"""The policy versions of a buffer as an asynchronous iterator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from experience_buffer._transport.policy_watch import METHOD, WatchedVersions
from experience_buffer._transport.settings import closed_error
from experience_buffer.errors import ExperienceBufferError, UnavailableError

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._async.connection import AsyncConnection


class AsyncPolicyVersions:
    """An endless async iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One task iterates; any
    of the same loop may close it.
    """

    def __init__(self, client: AsyncConnection, buffer: str) -> None:
        self._client = client
        self._versions = WatchedVersions(buffer, client.options.retry)
        self._closed = asyncio.Event()
        self._call: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[int | None]:
        return self

    async def __anext__(self) -> int | None:
        """Wait for the next version.

        Raises:
            StopAsyncIteration: This was closed.
            ExperienceBufferError: The server ended the call for good, or could not be reached for
                `RetryOptions.reconnect_seconds`.
        """
        while not self._closed.is_set():
            error: ExperienceBufferError
            if self._call is None:
                request: Any = self._versions.request
                self._call = self._client._open(METHOD, request)
            try:
                # Not `async for`: leaving one would cancel the call.
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    if self._versions.is_news(response):
                        return self._versions.last
                error = UnavailableError("the server ended the watch of the policy version")
            except grpc.RpcError as rpc_error:
                error = self._client._translate(rpc_error, METHOD)
            except asyncio.CancelledError:
                # A call that was cancelled, as by a timeout around this, has no more to say.
                self._call = None
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # So gRPC says that the call was cancelled otherwise.
                if self._client._is_closed:
                    raise closed_error("client") from None
                break
            self._call = None
            if self._closed.is_set():
                break
            delay = self._versions.delay_after(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), delay)
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the call, also while a task waits for a version. Idempotent."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
