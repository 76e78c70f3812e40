"""What the RPCs share: the buffers, the store, the server's limits and its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from experience_buffer import errors
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server import wire
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.buffer_settings import MAX_GROUP_SIZE
from experience_buffer_server.config import ServerSection
from experience_buffer_server.consumers import Want
from experience_buffer_server.ingest import Push
from experience_buffer_server.registry import Registry
from experience_buffer_server.sharing import RankOf
from experience_buffer_server.store.lmdb_store import LmdbStore

_MAX_TIMEOUT_SECONDS = 3600.0
_MAX_BATCH_SIZE = 65_536
"""Units in one batch: choosing them is one step, during which nothing else happens."""
_MAX_LEASE_SECONDS = 7 * 86400


@dataclass(slots=True)
class Backend:
    """What the service and its streams work on."""

    registry: Registry
    store: LmdbStore
    limits: ServerSection
    draining: asyncio.Event
    """Set when the server stops: waits end, pushes are refused."""

    def buffer(self, name: str) -> Buffer:
        """The buffer with this name.

        Raises:
            BufferNotFoundError: There is none.
        """
        return self.registry.get(name)

    async def push(self, request: service_pb2.PushRequest) -> service_pb2.PushResponse:
        """Store a push; answers after its commit.

        Raises:
            UnavailableError: The server is draining.
            ResourceExhaustedError: Too much waits for its commit.
        """
        buffer = self.buffer(request.buffer)
        self.check_can_store()
        if request.group_size > MAX_GROUP_SIZE:
            raise errors.InvalidRequestError(
                f"group_size {request.group_size} is over the limit of {MAX_GROUP_SIZE}",
                subject="group_size",
            )
        outcomes = await buffer.ingest.push(
            Push(
                payload=request.payload,
                tombstones=wire.tombstones_from(request.tombstones),
                group_size=request.group_size,
            )
        )
        return service_pb2.PushResponse(
            outcomes=[wire.outcome_message(i, outcome) for i, outcome in enumerate(outcomes)],
            policy_version=buffer.row.policy_version,
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

    def lease_seconds(self, buffer: Buffer, asked: float) -> float:
        """For how long a lease is to hold; 0 asks for the buffer's default.

        Raises:
            InvalidRequestError: It is out of bounds.
        """
        seconds = asked or buffer.settings.lease_seconds
        if not 0 < seconds <= _MAX_LEASE_SECONDS:
            raise errors.InvalidRequestError(
                f"lease_seconds {seconds} must lie in (0, {_MAX_LEASE_SECONDS}]",
                subject="lease_seconds",
            )
        return seconds

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
        if request.batch_size < 1 or request.min_batch_size > request.batch_size:
            raise errors.InvalidRequestError(
                f"batch_size {request.batch_size} must be at least 1, and min_batch_size "
                f"{request.min_batch_size} at most batch_size",
                subject="batch_size",
            )
        if request.batch_size > _MAX_BATCH_SIZE:
            raise errors.InvalidRequestError(
                f"batch_size {request.batch_size} is over the limit of {_MAX_BATCH_SIZE} units; "
                "sample several batches",
                subject="batch_size",
            )
        if request.format not in types_pb2.SampleFormat.values():
            raise errors.InvalidRequestError(
                f"format {request.format} is none of {types_pb2.SampleFormat.keys()}",
                subject="format",
            )
        lease_seconds = self.lease_seconds(buffer, request.lease_seconds)
        if not timeout_seconds >= 0:
            raise errors.InvalidRequestError(
                f"timeout_seconds {timeout_seconds} must be at least 0", subject="timeout_seconds"
            )
        return Want(
            batch_size=request.batch_size,
            min_batch_size=request.min_batch_size or request.batch_size,
            timeout_seconds=min(timeout_seconds, _MAX_TIMEOUT_SECONDS),
            lease_seconds=lease_seconds,
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
