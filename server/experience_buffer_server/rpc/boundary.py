"""The boundary of every RPC: counts it, times it, guards it, and turns errors into statuses.

It also refuses requests that can't be read: above the size limit, or no messages at all. gRPC's own
check of sizes knows no settings, so it is given twice the limit and only cuts off what is far above;
what lies between is read and refused here, unparsed. What can't be parsed gRPC answers with UNKNOWN,
and logs with a traceback as if it were a bug; here it is the caller's error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from experience_buffer import errors
from experience_buffer.status import to_status
from experience_buffer_server.access.calls import GuardedCall
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.quotas import Quotas
from experience_buffer_server.store.errors import as_client_error
from experience_buffer_server.store.interface import StoreError

_log = logging.getLogger(__name__)
_REQUEST_SECONDS = 120.0
"""For the request of a call to come: enough for a large one on a slow line."""
_ANONYMOUS_SECONDS = 10.0
"""For a short call that needs no grant, from its beginning to its end; half of it for its request."""

_ENDED = (grpc.aio.AbortError, grpc.RpcError)
"""A call that raised these has its status."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. It can be shared between calls."""

    def __init__(
        self,
        metrics: Metrics,
        guard: Guard,
        quotas: Quotas,
        *,
        max_message_bytes: int,
        readers: Mapping[str, Callable[[bytes], Any]],
    ) -> None:
        self._metrics = metrics
        self._guard = guard
        self._quotas = quotas
        self._max_message_bytes = max_message_bytes
        self._readers = readers
        """By the call's full name: what reads its requests instead of protobuf alone."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            unknown: Handler = grpc.stream_stream_rpc_method_handler(_unimplemented)
            return unknown
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        make, kind = _FACTORIES[handler.request_streaming, handler.response_streaming]
        guarded = GuardedCall(
            self._guard, handler_call_details.method, handler_call_details.invocation_metadata
        )
        labels = (kind, service, method)
        call = _Call(self._metrics, labels, guarded, self._quotas)
        if guarded.is_refused:
            refused: Handler = grpc.stream_stream_rpc_method_handler(call.refused)
            return refused
        # The stubs describe the threaded server; here behaviors are coroutines and generators.
        implemented: Any = (
            handler.unary_unary
            or handler.stream_unary
            or handler.unary_stream
            or handler.stream_stream
        )
        behavior = (
            call.streaming(implemented, is_stream=handler.request_streaming)
            if handler.response_streaming
            else call.unary(implemented)
        )
        wrapped: Handler = make(
            behavior,
            request_deserializer=_bounded(
                self._readers.get(handler_call_details.method, handler.request_deserializer),
                self._max_message_bytes,
                own_bytes=guarded.max_request_bytes,
            ),
            response_serializer=_writer(handler.response_serializer),
        )
        return wrapped


_FACTORIES: dict[tuple[bool, bool], tuple[Callable[..., Any], str]] = {
    (False, False): (grpc.stream_unary_rpc_method_handler, "unary"),
    (False, True): (grpc.stream_stream_rpc_method_handler, "server_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "client_stream"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "bidi_stream"),
}
"""All requests are streams to gRPC: so none is awaited, or received, before it is asked for."""


@dataclass(eq=False)
class _Call:
    _metrics: Metrics
    _labels: tuple[str, str, str]
    _guarded: GuardedCall
    _quotas: Quotas
    _is_let_in: bool = False
    """Whether anything of it may be read."""

    def unary(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def handle(requests: Any, context: Context) -> Any:
            async with self._answered(context):
                with self._guarded.entered(context) as guarded:
                    self._let_in()
                    return await behavior(guarded.check(await self._request(context)), context)

        return handle

    def streaming(self, behavior: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
        async def handle(requests: Any, context: Context) -> AsyncIterator[Any]:
            async with self._answered(context):
                with self._guarded.entered(context) as guarded, self._open_stream():
                    self._let_in()
                    if is_stream:
                        request = self._checked(requests)
                    else:
                        request = guarded.check(await self._request(context))
                        self._watch()
                    # Closed with the call, not when the collector finds it: it holds leases.
                    async with contextlib.aclosing(behavior(request, context)) as responses:
                        del request
                        async for response in responses:
                            guarded.sending()
                            yield response
                            guarded.sent()

        return handle

    async def refused(self, requests: Any, context: Context) -> AsyncIterator[Any]:
        """The handler of a call that is refused unread."""
        async with self._answered(context):
            self._guarded.entered(context)
        return
        yield

    def _answered(self, context: Context) -> _Call:
        """For the block around its handler: counts and times it; its error becomes a status."""
        self._context = context
        return self

    async def __aenter__(self) -> None:
        self._metrics.rpc_started(*self._labels)
        self._started = time.perf_counter()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A call that just ends was cancelled.
        code = "OK" if error is None else "CANCELLED"
        try:
            if isinstance(error, Exception) and not isinstance(error, _ENDED):
                status = to_status(explained(self._labels[2], error))
                code = status.code.name
                if not self._is_let_in:
                    _end_without_waiting()
                await self._context.abort_with_status(status)
        finally:
            seconds = time.perf_counter() - self._started
            self._metrics.rpc_handled(*self._labels, code, seconds)

    def _open_stream(self) -> contextlib.AbstractContextManager[None]:
        if self._guarded.is_anonymous:
            return contextlib.nullcontext()
        return self._quotas.streams.within(caller_of())

    def _let_in(self) -> None:
        """Take a place among the calls under way, until gRPC is done with this one.

        Raises:
            ResourceExhaustedError: There is none.
        """
        task = _task()
        if self._guarded.is_anonymous:
            self._place = self._quotas.asking.take_for(caller_of(), task)
            # Whether it doesn't ask or doesn't read the answer.
            ending = asyncio.get_running_loop().call_later(_ANONYMOUS_SECONDS, task.cancel)
            self._ending = ending
            task.add_done_callback(lambda _: ending.cancel())
        else:
            self._quotas.calls.take_for(caller_of(), task)
        self._is_let_in = True

    def _watch(self) -> None:
        """Change the place of an anonymous call for one that lasts.

        Raises:
            ResourceExhaustedError: There is none.
        """
        if self._guarded.is_anonymous:
            self._quotas.watching.take_for(caller_of(), _task())
            self._place()
            self._ending.cancel()

    async def _request(self, context: Context) -> Any:
        """The only request of a call.

        Raises:
            DeadlineExceededError: It doesn't come.
            InvalidRequestError: There is none, or it can't be read.
            ResourceExhaustedError: It is too large.
        """
        seconds = _ANONYMOUS_SECONDS / 2 if self._guarded.is_anonymous else _REQUEST_SECONDS
        try:
            async with asyncio.timeout(seconds):
                request = await context.read()
        except TimeoutError as error:
            self._is_let_in = False
            raise errors.DeadlineExceededError(
                f"the call's request hasn't come within {seconds:g} s; send it with the call"
            ) from error
        if request is grpc.aio.EOF:
            raise errors.InvalidRequestError("the call has no request; send one")
        return _read(request)

    async def _checked(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The requests of a stream, until one that can't be read, or that its caller may not make.

        Raises:
            ExperienceBufferError: As `_read` and `GuardedCall.check`; the stream ends with it.
        """
        async for request in requests:
            yield self._guarded.check(_read(request))


def _writer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """What writes a response, unless it is written already."""
    if serialize is None:
        return None
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _end_without_waiting() -> None:
    """End this task once gRPC has a status to send, whether or not its peer reads it.

    Else calls that were refused would hold what `server.max_calls` has for those that are served.
    """
    asyncio.get_running_loop().call_soon(_task().cancel)


async def _unimplemented(requests: Any, context: Context) -> AsyncIterator[Any]:
    """The handler of a call that there isn't, in gRPC's words."""
    _end_without_waiting()
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield


def explained(method: str, error: Exception) -> errors.ExperienceBufferError:
    """What the caller gets; of a bug only an id to ask for, by which the log has everything."""
    if isinstance(error, (errors.ExperienceBufferError, StoreError)):
        return as_client_error(error)
    incident = uuid.uuid4().hex[:12]
    _log.error("internal error %s in %s", incident, method, exc_info=error)
    return errors.InternalServerError(
        f"internal error {incident}; the server's log has the details under this id"
    )


def _bounded(
    deserialize: Callable[[bytes], Any] | None, limit_bytes: int, *, own_bytes: int = 0
) -> Callable[[bytes], Any]:
    """A deserializer that makes of what can't be read the error that `_read` raises.

    Args:
        deserialize: None: bytes as they are.
        limit_bytes: `server.max_message_bytes`.
        own_bytes: A smaller bound that the call itself has; 0: none.
    """
    limit = f"server.max_message_bytes is {limit_bytes}; send less at once, or raise the limit"
    if 0 < own_bytes < limit_bytes:
        limit_bytes = own_bytes
        limit = f"a request of this call may have {own_bytes} bytes"

    def read(data: bytes) -> Any:
        if len(data) > limit_bytes:
            return errors.ResourceExhaustedError(
                f"a message of {len(data)} bytes is over the limit: {limit}"
            )
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            return errors.InvalidRequestError(
                f"the {len(data)} bytes of the request can't be read ({error}); send a message of "
                "the service's contract"
            )

    return read


def _read(request: Any) -> Any:
    """The request.

    Raises:
        ResourceExhaustedError: It was too large.
        InvalidRequestError: It is no message of its type.
    """
    if isinstance(request, errors.ExperienceBufferError):
        raise request
    return request
