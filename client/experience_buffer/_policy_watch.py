"""Iterators over a buffer's policy versions, of both clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from experience_buffer._build import build
from experience_buffer._retry import Attempts
from experience_buffer._settings import closed_error
from experience_buffer.errors import ExperienceBufferError, UnavailableError
from experience_buffer.options import RetryOptions
from experience_buffer.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from typing import Self

    from experience_buffer._async_connection import AsyncConnection
    from experience_buffer._connection import Connection

logger = logging.getLogger("experience_buffer")
METHOD: Final = "WatchPolicyVersion"


class _Versions:
    """What was seen, and when to try again. Does no I/O.

    Args:
        buffer: The buffer's name.
        retry: For how long to reconnect.
    """

    def __init__(self, buffer: str, retry: RetryOptions) -> None:
        self.request: Final = build(pb.WatchPolicyVersionRequest, buffer=buffer)
        self._retry = retry
        self._attempts: Attempts | None = None
        self._seen = False
        self._last: int | None = None

    def is_news(self, response: pb.WatchPolicyVersionResponse) -> bool:
        """Take in a message; False when it repeats the last one, as after a reconnection."""
        self._attempts = None
        version = response.version if response.HasField("version") else None
        is_news = not self._seen or version != self._last
        self._seen, self._last = True, version
        return is_news

    @property
    def last(self) -> int | None:
        """The version last seen."""
        return self._last

    def delay_after(self, error: ExperienceBufferError) -> float:
        """Seconds to wait before reconnecting.

        Raises:
            ExperienceBufferError: `error` itself, when that can't help or comes too late.
        """
        self._attempts = self._attempts or Attempts(self._retry, self._retry.reconnect_seconds)
        delay = self._attempts.delay_after(error, idempotent=True)
        logger.info("policy version: %s; reconnecting in %.1f s", error, delay)
        return delay


class PolicyVersions:
    """An endless iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One thread iterates;
    any may close it.
    """

    def __init__(self, client: Connection, buffer: str) -> None:
        self._client = client
        self._versions = _Versions(buffer, client.options.retry)
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


class AsyncPolicyVersions:
    """An endless async iterator of policy versions; a context manager whose end ends the call.

    The first is the one published now, None before any; then each change, of which a slow reader
    may miss all but the newest. It reconnects when the connection breaks. One task iterates; any
    of the same loop may close it.
    """

    def __init__(self, client: AsyncConnection, buffer: str) -> None:
        self._client = client
        self._versions = _Versions(buffer, client.options.retry)
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
