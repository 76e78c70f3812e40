"""The wrapper around every RPC: statuses from errors, counts, and generators closed at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from experience_buffer import errors
from experience_buffer_server.access.audit import Audit
from experience_buffer_server.access.calls import GuardedCall
from experience_buffer_server.access.grants import Grants
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.rpc import boundary
from experience_buffer_server.rpc.boundary import _Call
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.quotas import Quotas
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.interface import (
    DamagedRecordError,
    StoreFailedError,
    StoreFullError,
)

GUARD = Guard(
    None, Audit(time.monotonic), shows_certificates=False, count=lambda method, reason: None
)
LABELS = {"grpc_type": "unary", "grpc_service": "S", "grpc_method": "M"}


class Context:
    """The part of a call's context that the boundary needs."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    async def read(self) -> None:
        return None

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise grpc.aio.AbortError


def _call(metrics: Metrics, kind: str) -> _Call:
    quotas = Quotas(ServerSection(), metrics)
    return _Call(metrics, (kind, "S", "M"), GuardedCall(GUARD, "/S/M", ()), quotas)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.WrongStateError("x"), "FAILED_PRECONDITION"),
        (StoreFullError("x"), "RESOURCE_EXHAUSTED"),
        (StoreFailedError("x"), "UNAVAILABLE"),
        (DamagedRecordError("x"), "DATA_LOSS"),
        (KeyError("secret"), "INTERNAL"),
    ],
)
async def test_errors_become_statuses_and_are_counted(error: Exception, code: str) -> None:
    async def fails(request: Any, context: Any) -> Any:
        raise error

    metrics, context = Metrics(), Context()
    with pytest.raises(grpc.aio.AbortError):
        await _call(metrics, "unary").unary(fails)(None, context)
    assert context.status.code.name == code
    assert "secret" not in context.status.details
    count = metrics.registry.get_sample_value(
        "grpc_server_handled_total", LABELS | {"grpc_code": code}
    )
    assert count == 1


async def test_a_stream_that_is_left_is_closed_at_once() -> None:
    ended: list[str] = []

    async def stream(request: Any, context: Any) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append("closed")

    wrapped = _call(Metrics(), "bidi_stream").streaming(stream, is_stream=True)(None, Context())
    assert await anext(wrapped) == 1
    await wrapped.aclose()
    assert ended == ["closed"]


@pytest.mark.parametrize(("kind", "seconds"), [("unary", 0.01), ("server_stream", 0.01)])
async def test_a_request_that_does_not_come_is_not_awaited_for_ever(
    kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Context):
        async def read(self) -> None:
            await asyncio.Event().wait()

    async def never(request: Any, context: Any) -> Any:
        raise AssertionError("it was called")

    monkeypatch.setattr(boundary, "_REQUEST_SECONDS", seconds)
    call, context = _call(Metrics(), kind), Silent()
    if kind == "unary":
        made = call.unary(never)(None, context)
    else:
        made = anext(call.streaming(never, is_stream=False)(None, context))
    with pytest.raises(grpc.aio.AbortError):
        await made
    assert context.status.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_that_is_refused_unread_does_not_wait_for_its_peer() -> None:
    """One who reads no answers would hold one of `server.max_calls` with each."""

    class Unread(Context):
        async def abort_with_status(self, status: grpc.Status) -> None:
            self.status = status
            await asyncio.Event().wait()

    by = Guard(Grants([]), GUARD.audit, shows_certificates=False, count=lambda method, reason: None)
    metrics = Metrics()
    context: Any = Unread()
    guarded = GuardedCall(by, "/S/M", ())
    call = _Call(metrics, ("unary", "S", "M"), guarded, Quotas(ServerSection(), metrics))

    async def handle() -> None:
        async for _ in call.refused(None, context):
            raise AssertionError("it was answered")

    done, _ = await asyncio.wait((asyncio.create_task(handle()),), timeout=20)
    assert [task.cancelled() for task in done] == [True]
    assert context.status.code is grpc.StatusCode.UNAUTHENTICATED
