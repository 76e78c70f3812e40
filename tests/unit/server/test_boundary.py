"""The wrapper around every RPC: statuses from errors, counts, and generators closed at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from experience_buffer import errors
from experience_buffer_server.interceptors.boundary import _Call
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store import DamagedRecordError, StoreFailedError, StoreFullError

LABELS = {"grpc_type": "unary", "grpc_service": "S", "grpc_method": "M"}


class Context:
    """The part of a call's context that an abort needs."""

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise grpc.aio.AbortError


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
        await _Call(metrics, "unary", "S", "M").unary(fails)(None, context)
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

    wrapped = _Call(Metrics(), "bidi_stream", "S", "M").streaming(stream, is_stream=True)(
        None, Context()
    )
    assert await anext(wrapped) == 1
    await wrapped.aclose()
    assert ended == ["closed"]
