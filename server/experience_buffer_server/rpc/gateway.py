"""What the RPCs share: the buffers, the store, the server's limits and its end."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from experience_buffer import errors
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.leasing import Prepare
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.intake.push_room import Patience
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.state.consumers import Want, checked_want
from experience_buffer_server.rpc.push_codec import Pushed, PushRequest
from experience_buffer_server.runtime.callers import caller_of, current_caller
from experience_buffer_server.runtime.loop_turns import Turns
from experience_buffer_server.runtime.quotas import Charge, Quotas
from experience_buffer_server.runtime.response_bytes import Responses
from experience_buffer_server.runtime.shared_memory import SharedMemory
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.settings.server import ServerSection
from experience_buffer_server.store.fullness import Fullness
from experience_buffer_server.store.interface import Snapshots, Store

_PUSH_MARGIN_SECONDS = 0.2
"""Between the end of a push's wait for room and the deadline of its call: to commit, and to answer."""


@dataclass(slots=True)
class Backend:
    """What the service and its streams work on."""

    registry: Registry
    store: Store
    limits: ServerSection
    draining: asyncio.Event
    """Set when the server stops: waits end, pushes are refused."""
    snapshots: Snapshots | None
    """None: the store's engine has none."""
    quotas: Quotas = field(init=False)
    """What clients and buffers may hold at once."""
    responses: Responses = field(init=False)
    """What may be on its way to clients."""
    shared_memory: SharedMemory = field(init=False)
    """What clients on this machine have of it."""
    fullness: Fullness = field(init=False)
    """Of the store and its disk."""
    address: str = field(init=False, default="")
    """Where the server listens."""
    looks: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(2))
    """Calls that go through much of a buffer, a slice at a time: more at once would be felt."""
    turns: Turns = field(init=False, default_factory=Turns)
    """Of pushes, whose reading takes the event loop for long; a line for each connection."""

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.limits, self.registry.metrics)
        self.fullness = Fullness(self.store)
        self.responses = Responses(self.limits, self.registry.metrics)
        self.shared_memory = SharedMemory(self.limits.max_shared_bytes, self.registry.metrics)

    def buffer(self, name: str) -> Buffer:
        """The buffer with this name.

        Raises:
            BufferNotFoundError: There is none.
        """
        return self.registry.get(name)

    async def push(self, request: PushRequest, *, remaining_seconds: float | None = None) -> Pushed:
        """Store a push; answers after its commit.

        Args:
            request: The push.
            remaining_seconds: Until the call's deadline; None where it has none.

        Raises:
            UnavailableError: The server is draining.
            ResourceExhaustedError: Too much waits for its commit or for room.
            BufferNotFoundError: There is no such buffer, or not any more after a wait.
        """
        deadline = math.inf if remaining_seconds is None else time.monotonic() + remaining_seconds
        buffer = self.buffer(request.buffer)
        # Before anything is made of it.
        buffer.check_push(num_tombstones=len(request.tombstones), group_size=request.group_size)
        with self.pending(buffer, request.num_bytes) as charge:
            turn = await self.turns.take(current_caller().peer)
            try:
                self.check_can_store()
                buffer = self.buffer(buffer.name)
                push = request.push()
                admitted = await buffer.admit(push, turn)
                await self.store.until_short()
            finally:
                turn.end()
            # What follows, up to the commit, belongs to the turn: nothing is waited for.
            self.check_can_store()
            buffer = self.buffer(buffer.name)
            # What is stored after the client's deadline would have to be pushed again to be known.
            last = time.monotonic() + buffer.settings.full_timeout_seconds
            last = min(last, deadline - _PUSH_MARGIN_SECONDS)
            patience = Patience(deadline=last, stop=self.draining)
            storing = buffer.push(push, patience, charge, admitted)
            del admitted
            return Pushed(await storing, buffer.policy_version)

    def pending(self, buffer: Buffer, num_bytes: int) -> AbstractContextManager[Charge]:
        """Hold the bytes of a request that brings some, until it is answered."""
        return self.quotas.pending(
            caller_of(),
            buffer.name,
            num_bytes,
            max_of_buffer=buffer.settings.max_pending_bytes,
        )

    async def sample(
        self,
        buffer: Buffer,
        consumer: str,
        want: Want,
        rank_of: RankOf | None,
        *,
        prepare: Prepare | None = None,
    ) -> tuple[Lease | None, str]:
        """Lease one batch, waiting for it if need be; see `Buffer.sample`.

        Raises:
            ResourceExhaustedError: The caller waits in too many calls.
        """
        with self.quotas.samples.within(caller_of()):
            return await buffer.sample(
                consumer, want, self.draining, rank_of=rank_of, prepare=prepare
            )

    def check_can_store(self) -> None:
        """Refuse what brings new bytes when there is no point in trying.

        Raises:
            UnavailableError: The server is draining.
            ResourceExhaustedError: Too much waits for its commit.
        """
        if self.draining.is_set():
            raise errors.UnavailableError(
                "the server is stopping; send it again elsewhere or later", retry_delay_seconds=1.0
            )
        if self.store.pending_bytes > self.limits.max_pending_bytes:
            raise errors.ResourceExhaustedError(
                f"{self.store.pending_bytes} bytes wait for their commit, the limit "
                f"server.max_pending_bytes is {self.limits.max_pending_bytes}",
                retry_delay_seconds=0.1,
            )

    def want(
        self,
        buffer: Buffer,
        request: service_pb2.SampleRequest | service_pb2.SampleStreamOpen,
        *,
        timeout_seconds: float,
        max_bytes: int,
    ) -> Want:
        """What a sample request asks for, checked.

        Raises:
            InvalidRequestError: A number is out of bounds.
        """
        if request.format not in types_pb2.SampleFormat.values():
            raise errors.InvalidRequestError(
                f"format {request.format} is none of {types_pb2.SampleFormat.keys()}",
                subject="format",
            )
        return checked_want(
            buffer.settings,
            batch_size=request.batch_size,
            min_batch_size=request.min_batch_size,
            timeout_seconds=timeout_seconds,
            lease_seconds=request.lease_seconds,
            max_bytes=max_bytes,
        )


def rank_of(
    request: service_pb2.SampleRequest | service_pb2.SampleStreamOpen,
) -> RankOf | None:
    """Which part of a shared batch a request asks for; None where it asks for its own."""
    if not request.HasField("rank_of"):
        return None
    asked = request.rank_of
    return RankOf(rank=asked.rank, world_size=asked.world_size, after_lease_id=asked.after_lease_id)
