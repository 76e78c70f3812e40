"""What the async client's verbs run on: its channel, and one call with its retries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any, TypeVar

import grpc
import grpc.aio

from experience_buffer._async.primitives import Closing, is_cancelling
from experience_buffer._messages import calls, fields, push_bytes
from experience_buffer._transport import channel as _channel
from experience_buffer._transport.retry import Attempts
from experience_buffer._transport.settings import GIVE_UP_SECONDS, ClientSettings, closed_error
from experience_buffer.errors import (
    DeadlineExceededError,
    ExperienceBufferError,
    WrongStateError,
)

T = TypeVar("T")


class _LateEvents(logging.Filter):
    """Leaves out what asyncio logs where gRPC tells a loop that has ended how a call of its own ended.

    A loop that is closed while calls are being cancelled doesn't hear of their last events; nobody waits
    for them. gRPC hands these out in whichever loop runs then, which logs a traceback.
    """

    @classmethod
    def install(cls) -> None:
        """Do so from now on. Idempotent."""
        logger = logging.getLogger("asyncio")
        if not any(isinstance(each, cls) for each in logger.filters):
            logger.addFilter(cls())

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        return not (is_late and "PollerCompletionQueue._handle_events" in record.getMessage())


class AsyncConnection(Closing, ClientSettings):
    """Makes the channel when it is first needed, one per event loop."""

    def _prepare(self) -> None:
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: AsyncGenerator[None, None] | None = None
        """Closes the channel, also when its loop ends before this is closed."""
        self._stopped = asyncio.Event()
        """Set by `close`, for those who wait in that loop."""
        self._closed = False
        self._leasing: list[calls.Call[int]] = []
        """What gives up each call under way that leases."""
        self._telling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled. Idempotent."""
        self._closed = True
        end, self._end = self._end, None
        if end is not None and self._loop is asyncio.get_running_loop():
            self._stopped.set()
            await self._give_up_all()
            await end.aclose()
        self._stub = None

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
        **values: Any,
    ) -> T:
        """Call a method whose request has these fields."""
        call = calls.call_of(method, parse, idempotent=idempotent, **values)
        return await self._run(call, timeout)

    async def _run(self, call: calls.Call[T], timeout: float | None = None) -> T:
        attempts = Attempts(self._options.retry, self._seconds(timeout))
        while True:
            try:
                answer = await getattr(self._get_stub(), call.method)(
                    call.request, timeout=attempts.remaining(), metadata=self._metadata
                )
                self._outage.ended()
                return call.parse(answer)
            except grpc.RpcError as error:
                failure = self._translate(error, call.method)
            except ExperienceBufferError as error:
                failure = error
            except asyncio.CancelledError:
                # gRPC cancels the waiting task too when the channel is closed.
                if self._closed and not is_cancelling():
                    raise closed_error("client") from None
                raise
            delay = self._delay_after(
                failure, attempts, idempotent=call.idempotent, what=fields.verb(call.method)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
            if self._closed:
                raise closed_error("client") from failure

    async def _run_unless_given_up(
        self, call: calls.Call[T], give_up: calls.Call[int], timeout: float
    ) -> T:
        """Run a call that leases; where nobody gets its answer, the server is told."""
        self._leasing.append(give_up)
        try:
            return await self._run(call, timeout)
        except (ExperienceBufferError, GeneratorExit) as error:
            # A refusal leases nothing, and a task whose loop is gone says nothing any more.
            if isinstance(error, DeadlineExceededError):
                self._tell(give_up)
            raise
        except BaseException:
            self._tell(give_up)
            raise
        finally:
            self._leasing.remove(give_up)

    def _tell(self, give_up: calls.Call[int]) -> None:
        """Let the server know of a call that was given up, beside whatever comes next."""
        if self._stub is None:
            return  # Nothing was sent, or `close` has told of it.
        telling = asyncio.get_running_loop().create_task(self._told(self._stub, give_up))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _told(self, stub: Any, give_up: calls.Call[int]) -> None:
        # Else it has ended with the call, or will at the end of its lease.
        with contextlib.suppress(grpc.RpcError):
            await getattr(stub, give_up.method)(
                give_up.request, timeout=GIVE_UP_SECONDS, metadata=self._metadata
            )

    async def _give_up_all(self) -> None:
        """Before the channel is closed: let the server know of calls that are under way."""
        for give_up in self._leasing:
            self._tell(give_up)
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=GIVE_UP_SECONDS)

    def _open(self, method: str, requests: AsyncIterator[Any] | None) -> Any:
        """Open a stream; without a deadline, since keepalive finds a dead server."""
        return getattr(self._get_stub(), method)(requests, metadata=self._metadata)

    def _get_stub(self) -> Any:
        if self._closed:
            raise closed_error("client")
        loop = asyncio.get_running_loop()
        if self._stub is None or self._loop is not loop:
            if self._loop is not None and self._loop is not loop and self._loop.is_running():
                # A channel for this one would end the calls of that one.
                raise WrongStateError(
                    "the client is in use by an event loop of another thread; make an AsyncClient for "
                    "each, or take Client, which threads may share"
                )
            _channel.note_use()
            _LateEvents.install()
            arguments = _channel.arguments(self._options, self._tls, target=self._target)
            channel = (
                grpc.aio.insecure_channel(self._target, arguments)
                if self._tls is None
                else grpc.aio.secure_channel(
                    self._target, _channel.credentials(self._tls), arguments
                )
            )
            self._stub = push_bytes.make_stub(channel)
            self._loop, self._stopped = loop, asyncio.Event()
            self._end = _open_until_the_loop_ends(channel, self._telling)
        return self._stub


def _open_until_the_loop_ends(
    channel: grpc.aio.Channel, telling: Collection[asyncio.Task[None]]
) -> AsyncGenerator[None, None]:
    """What closes a channel when it is closed itself, and at the latest at the end of this loop.

    A loop that ends closes the generators that were begun in it (`loop.shutdown_asyncgens`).

    Args:
        channel: The channel.
        telling: What is said on it to the end, by calls that the loop has cancelled.
    """

    async def end() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if telling:
                await asyncio.wait(set(telling), timeout=GIVE_UP_SECONDS)
            await channel.close()

    made = end()
    with contextlib.suppress(StopIteration):
        made.__anext__().send(None)  # It stops at once, where it is to wait.
    return made
