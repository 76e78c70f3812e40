"""The two streaming RPCs: pipelined pushes, and batches against credits.

Each session owns its stream. When it ends, for whatever reason, nothing of it is left behind:
tasks are cancelled and leases that weren't acknowledged are offered again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from experience_buffer import errors
from experience_buffer.status import to_request_error
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.push_codec import (
    PushRequest,
    PushStreamRequest,
    write_push_stream,
)
from experience_buffer_server.runtime.shared_memory import PushMemory
from experience_buffer_server.store.errors import as_client_error
from experience_buffer_server.store.interface import StoreError

_MAX_PUSHES = 64
"""Pushes of one stream that are under way at once; beyond, the stream isn't read."""


class PushSession:
    """One PushStream: requests are taken in order, answered in order, and committed together."""

    def __init__(self, backend: Backend, requests: AsyncIterator[PushStreamRequest]) -> None:
        self._backend = backend
        self._requests = requests
        self._answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_MAX_PUSHES)
        self._memory: PushMemory | None = None
        self._is_receiving = False

    async def responses(self) -> AsyncIterator[bytes]:
        """A `PushStreamResponse` per request, in order, each after its commit."""
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read())
        stopping = loop.create_task(self._stop(reader))
        try:
            while (answer := await self._answers.get()) is not None:
                yield await answer
            await reader
        finally:
            stopping.cancel()
            reader.cancel()
            # What is under way is stored all the same; what still waits for room is given up.
            while not self._answers.empty():
                push = self._answers.get_nowait()
                if push is not None:
                    push.cancel()
            if self._memory is not None:
                self._memory.close()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        requests, draining = aiter(self._requests), self._backend.draining
        try:
            while not draining.is_set():
                request = await self._received(requests)
                if request is None:
                    break
                if request.asked is not None:
                    self._share(request.asked)
                    if self._memory is None:
                        continue
                    answer = self._offer(request.sequence, self._memory)
                else:
                    answer = self._push(request)
                push = loop.create_task(answer)
                try:
                    await self._answers.put(push)
                except asyncio.CancelledError:
                    push.cancel()
                    raise
        except asyncio.CancelledError:
            if not draining.is_set():
                raise
        finally:
            await self._answers.put(None)

    async def _received(
        self, requests: AsyncIterator[PushStreamRequest]
    ) -> PushStreamRequest | None:
        """The next request; None: there is none any more."""
        self._is_receiving = True
        try:
            return await anext(requests, None)
        finally:
            self._is_receiving = False

    async def _stop(self, reader: asyncio.Task[None]) -> None:
        """When the server drains nothing more is read; what was read is answered."""
        await self._backend.draining.wait()
        if self._is_receiving:
            reader.cancel()

    def _share(self, asked: types_pb2.MemoryRequest) -> None:
        """Have memory that is shared with the client, if there is any.

        Raises:
            InvalidRequestError: The stream has some.
        """
        if self._memory is not None:
            raise errors.InvalidRequestError(
                "the stream has shared memory already; ask once", subject="memory"
            )
        self._memory = self._backend.shared_memory.for_pushes(asked)

    @staticmethod
    async def _offer(sequence: int, memory: PushMemory) -> bytes:
        return service_pb2.PushStreamResponse(
            sequence=sequence, memory=memory.offer()
        ).SerializeToString()

    def _with_lent(self, request: PushStreamRequest) -> PushRequest:
        """The push, with the payloads that lie in shared memory.

        Raises:
            InvalidRequestError: There is no such memory, or they don't lie in it.
            ResourceExhaustedError: They are too large together.
        """
        if not request.spans:
            return request.push
        if self._memory is None:
            raise errors.InvalidRequestError(
                "the stream has no shared memory: send payloads in push", subject="spans"
            )
        lent = self._memory.payloads(request.spans)
        push, limit = request.push, self._backend.limits.max_message_bytes
        num_bytes = push.num_bytes + sum(map(len, lent))
        if num_bytes > limit:
            raise errors.ResourceExhaustedError(
                f"a push of {num_bytes} bytes is over the limit: server.max_message_bytes is "
                f"{limit}; send less at once, or raise the limit"
            )
        payloads = [*push.payloads, *lent]
        return dataclasses.replace(push, payloads=payloads, num_bytes=num_bytes, is_lent=True)

    async def _push(self, request: PushStreamRequest) -> bytes:
        try:
            push = self._with_lent(request)
            pushed = await self._backend.push(push)
        except (errors.ExperienceBufferError, StoreError) as error:
            return service_pb2.PushStreamResponse(
                sequence=request.sequence, error=to_request_error(as_client_error(error))
            ).SerializeToString()
        return write_push_stream(request.sequence, pushed)


async def policy_versions(
    backend: Backend, buffer_name: str
) -> AsyncIterator[service_pb2.WatchPolicyVersionResponse]:
    """The published version of a buffer, now and whenever it changes, until the server drains.

    Versions that come and go faster than they are sent are left out: the newest counts.

    Raises:
        BufferNotFoundError: There is no such buffer, or no longer.
    """
    loop = asyncio.get_running_loop()
    stopping = loop.create_task(backend.draining.wait())
    try:
        while not backend.draining.is_set():
            buffer = backend.buffer(buffer_name)
            version, changed = buffer.policy_version, buffer.version_changed
            yield service_pb2.WatchPolicyVersionResponse(version=version)
            waiting = loop.create_task(changed.wait())
            try:
                await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
    finally:
        stopping.cancel()
