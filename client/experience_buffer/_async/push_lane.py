"""The async client's stream for pushes that soon follow one another; see `_sync/push_lane.py`."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from experience_buffer._messages.push_body import PushBody
from experience_buffer._transport import lane
from experience_buffer._transport.lane import KEEP_SECONDS, PAUSE_SECONDS
from experience_buffer._transport.lane_memory import LaneMemory
from experience_buffer.v1 import service_pb2 as pb

if TYPE_CHECKING:
    from experience_buffer._async.connection import AsyncConnection


class AsyncPushLane:
    """The stream that pushes of one channel use in turn. Belongs to the channel's event loop."""

    def __init__(self) -> None:
        self._is_busy = False
        self._call: Any = None
        self._memory = LaneMemory(is_wanted=False)
        """Of that stream."""
        self._watching: asyncio.Task[None] | None = None
        """Ends the stream when nobody has used it for a while, and with the event loop."""
        self._idle_since = -math.inf
        self._soon_until = -math.inf
        self._not_before = -math.inf
        self._num_sent = 0

    async def push(
        self, client: AsyncConnection, body: PushBody, timeout: float
    ) -> pb.PushResponse | None:
        """Do what `PushLane.push` does; what cancels it ends the stream."""
        is_time = self._not_before < time.monotonic() < self._soon_until
        if self._is_busy or not is_time:
            return None
        if self._call is None or self._call.done():
            self._call, self._memory = None, LaneMemory(is_wanted=client.options.shared_memory)
        if not self._memory.takes(body.num_bytes):
            return None
        self._is_busy = True
        try:
            return await self._exchange(client, body, timeout)
        finally:
            self._is_busy = False

    def pushed(self) -> None:
        """A push was answered just now."""
        self._soon_until = time.monotonic() + KEEP_SECONDS

    def close(self) -> None:
        """End the stream. Idempotent."""
        call, self._call = self._call, None
        watching, self._watching = self._watching, None
        self._memory = LaneMemory(is_wanted=False)  # That of a stream that is gone.
        if call is not None:
            call.cancel()
        if watching is not None:
            watching.cancel()

    async def _exchange(
        self, client: AsyncConnection, body: PushBody, timeout: float
    ) -> pb.PushResponse | None:
        is_answered = False
        self._num_sent += 1
        try:
            async with asyncio.timeout(timeout):
                call = self._taken(client)
                for message in self._memory.messages(self._num_sent, body, timeout):
                    await call.write(message)
                answer = await call.read()
                if answer is not grpc.aio.EOF and self._memory.is_offer(answer):
                    answer = await call.read()
            if answer is grpc.aio.EOF:
                return None
            is_answered = answer.sequence == self._num_sent
        except TimeoutError:
            raise lane.late_error(timeout) from None
        except (asyncio.InvalidStateError, grpc.RpcError):
            # The first is how gRPC refuses to write on a stream that has ended meanwhile.
            return None
        finally:
            self._put_back(is_answered)
        if is_answered:
            self._memory.answered(answer, body)
        return lane.response_of(answer, self._num_sent)

    def _taken(self, client: AsyncConnection) -> Any:
        """The stream, opened if need be."""
        if self._call is None:
            self._call = client._open("PushStream", None)
            # A timer would end with the event loop, and leave gRPC a stream without one.
            self._watching = asyncio.create_task(self._watch(self._call))
        return self._call

    async def _watch(self, call: Any) -> None:
        try:
            while self._call is call:
                rest = self._idle_since + KEEP_SECONDS - time.monotonic()
                if rest <= 0 and not self._is_busy:
                    return
                await asyncio.sleep(KEEP_SECONDS if self._is_busy else rest)
        finally:
            if self._call is call:
                self._watching = None
                self.close()

    def _put_back(self, is_answered: bool) -> None:
        self._idle_since = time.monotonic()
        if not is_answered:
            self._not_before = time.monotonic() + PAUSE_SECONDS
            self.close()
