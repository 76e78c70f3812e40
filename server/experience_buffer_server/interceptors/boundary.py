"""The boundary of every RPC: counts it, times it, and turns errors into statuses."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from experience_buffer import errors
from experience_buffer.status import to_status
from experience_buffer_server.faults import as_client_error
from experience_buffer_server.interceptors import size
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import StoreError

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. It can be shared between calls."""

    def __init__(self, metrics: Metrics, *, max_message_bytes: int) -> None:
        self._metrics = metrics
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        make, kind = _FACTORIES[handler.request_streaming, handler.response_streaming]
        call = _Call(self._metrics, kind, service, method)
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
            request_deserializer=size.bounded(
                handler.request_deserializer, self._max_message_bytes
            ),
            response_serializer=handler.response_serializer,
        )
        return wrapped


_FACTORIES: dict[tuple[bool, bool], tuple[Callable[..., Any], str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "server_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "client_stream"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "bidi_stream"),
}


class _Call:
    def __init__(self, metrics: Metrics, kind: str, service: str, method: str) -> None:
        self._metrics = metrics
        self._labels = (kind, service, method)

    def unary(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def handle(request: Any, context: Context) -> Any:
            with _Timing(self._metrics, self._labels) as timing:
                try:
                    return await behavior(size.checked(request), context)
                except (errors.ExperienceBufferError, StoreError) as error:
                    await self._abort(as_client_error(error), context, timing)
                except (grpc.aio.AbortError, grpc.RpcError):
                    raise
                except Exception as error:
                    await self._abort(_bug(self._labels[2], error), context, timing)

        return handle

    def streaming(self, behavior: Callable[..., Any], *, is_stream: bool) -> Callable[..., Any]:
        async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
            with _Timing(self._metrics, self._labels) as timing:
                try:
                    request = size.all_checked(request) if is_stream else size.checked(request)
                    # Closed with the call, not when the collector finds it: it holds leases.
                    async with contextlib.aclosing(behavior(request, context)) as responses:
                        async for response in responses:
                            yield response
                except (errors.ExperienceBufferError, StoreError) as error:
                    await self._abort(as_client_error(error), context, timing)
                except (grpc.aio.AbortError, grpc.RpcError):
                    raise
                except Exception as error:
                    await self._abort(_bug(self._labels[2], error), context, timing)

        return handle

    async def _abort(
        self, error: errors.ExperienceBufferError, context: Context, timing: _Timing
    ) -> NoReturn:
        status = to_status(error)
        timing.code = status.code.name
        await context.abort_with_status(status)
        raise AssertionError("abort_with_status returned")


class _Timing:
    """Counts one call from its start to its end; a call that just ends was cancelled."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str, str]) -> None:
        self._metrics = metrics
        self._labels = labels
        self.code = ""

    def __enter__(self) -> _Timing:
        self._metrics.rpc_started(*self._labels)
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        code = self.code or ("OK" if kind is None else "CANCELLED")
        self._metrics.rpc_handled(*self._labels, code, time.perf_counter() - self._started)


def _bug(method: str, error: Exception) -> errors.InternalServerError:
    """A bug: the log has everything, the caller only an id to ask for."""
    incident = uuid.uuid4().hex[:12]
    _log.error("internal error %s in %s", incident, method, exc_info=error)
    return errors.InternalServerError(
        f"internal error {incident}; the server's log has the details under this id"
    )
