"""Calls and streams of samples without gRPC: what is asked for, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.sample_call import sample
from experience_buffer_server.rpc.sample_stream import SampleSession
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.runtime.response_bytes import Hold
from tests.unit.builders import World

Request = service_pb2.SampleStreamRequest


async def serving(world: World, *pushes: Push, **consumer: Any) -> tuple[Backend, Buffer]:
    """What is behind the service, and its buffer, whose trainer gets nothing twice."""
    trainer = {"name": "trainer", "max_deliveries": 1} | consumer
    backend = await world.backend(consumers=[trainer])
    buffer = backend.buffer("math")
    for each in pushes:
        await buffer.push(each)
    return backend, buffer


def _asked(**fields: Any) -> dict[str, Any]:
    return {"buffer": "math", "consumer": "trainer", "batch_size": 1} | fields


def opening(**fields: Any) -> Request:
    """The first message of a stream."""
    return Request(open=service_pb2.SampleStreamOpen(**_asked(**fields)))


async def saying(messages: Iterable[Any], *, ends: bool = False) -> AsyncIterator[Any]:
    """What a client says, who then waits unless it ends."""
    for message in messages:
        yield message
    if not ends:
        await asyncio.Event().wait()


async def sampling(
    backend: Backend, requests: AsyncIterator[Any]
) -> AsyncGenerator[service_pb2.SampleStreamResponse]:
    """What a sample stream answers, as messages."""
    async with contextlib.aclosing(SampleSession(backend, requests).responses()) as responses:  # type: ignore[type-var]
        async for data in responses:
            yield service_pb2.SampleStreamResponse.FromString(data)


def granting(backend: Backend, num_credits: int, *more: Request, **fields: Any) -> Any:
    """A sample stream that is open and has so many credits."""
    return sampling(backend, saying([opening(**fields), Request(credits=num_credits), *more]))


async def frame_of(stream: Any) -> Any:
    """The next frame of a stream."""
    return (await asyncio.wait_for(anext(stream), 10)).frame


def calling(
    backend: Backend, *, seconds: float = 0.01, holds: list[Hold] | None = None, **fields: Any
) -> asyncio.Task[bytes]:
    """A call under way; what it holds of the bytes of responses is noted, or let go at its end."""
    held: list[Hold] = [] if holds is None else holds
    request = service_pb2.SampleRequest(**_asked(**fields))
    task = asyncio.create_task(
        sample(
            backend,
            request,
            timeout_seconds=seconds,
            until_sent=held.append,
            leased=lambda *_: None,
        )
    )

    def ended(_: object) -> None:
        for hold in held:
            hold.release()

    if holds is None:
        task.add_done_callback(ended)
    return task


async def called(backend: Backend, **fields: Any) -> service_pb2.SampleResponse:
    """What a call is answered."""
    data = await asyncio.wait_for(calling(backend, **fields), 10)
    return service_pb2.SampleResponse.FromString(data)


def fill(backend: Backend) -> Callable[[], None]:
    """Let the caller have so many bytes under way that it waits for more; ends that."""
    held = [backend.responses.take(caller_of(), 2**40) for _ in range(2)]

    def go() -> None:
        while held:
            held.pop(0).release()

    return go
