"""The gRPC service: from messages to the buffers and back. No rules here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer import errors
from experience_buffer.v1 import service_pb2, service_pb2_grpc
from experience_buffer_server import __version__, queries, wire
from experience_buffer_server.assembly import sampled
from experience_buffer_server.backend import Backend
from experience_buffer_server.stats import buffer_stats
from experience_buffer_server.streams import PushSession, SampleSession

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_ENVELOPE_BYTES = 64 * 1024
"""Room in a response for everything but payloads."""


class Service(service_pb2_grpc.ExperienceBufferServicer):
    """The servicer; errors become statuses in the interceptor."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._started = time.monotonic()

    async def Push(
        self, request: service_pb2.PushRequest, context: Context
    ) -> service_pb2.PushResponse:
        """Store experiences."""
        return await self._backend.push(request)

    def PushStream(
        self, request_iterator: AsyncIterator[service_pb2.PushStreamRequest], context: Context
    ) -> AsyncIterator[service_pb2.PushStreamResponse]:
        """Store experiences, many requests on one stream."""
        return PushSession(self._backend, request_iterator).responses()

    async def SealGroup(
        self, request: service_pb2.SealGroupRequest, context: Context
    ) -> service_pb2.SealGroupResponse:
        """Close a group."""
        buffer = self._backend.buffer(request.buffer)
        group = await buffer.grouping.seal(request.group, request.group_size)
        return service_pb2.SealGroupResponse(
            num_members=group.num_members, group_size=group.row.size
        )

    async def DropGroup(
        self, request: service_pb2.DropGroupRequest, context: Context
    ) -> service_pb2.DropGroupResponse:
        """Discard a group."""
        buffer = self._backend.buffer(request.buffer)
        num_dropped = await buffer.grouping.drop(request.group, request.reason)
        return service_pb2.DropGroupResponse(num_dropped=num_dropped)

    async def Sample(
        self, request: service_pb2.SampleRequest, context: Context
    ) -> service_pb2.SampleResponse:
        """Lease one batch."""
        backend = self._backend
        buffer = backend.buffer(request.buffer)
        remaining = context.time_remaining()
        timeout = request.timeout_seconds
        if remaining is not None:
            # Answer before the client's deadline: a batch that comes after it is lost to its lease.
            timeout = min(timeout, max(remaining - 0.1, 0.0))
        max_bytes = backend.limits.max_message_bytes - _ENVELOPE_BYTES
        want = backend.want(buffer, request, timeout_seconds=timeout, max_bytes=max_bytes)
        lease, shortfall = await buffer.sample(request.consumer, want, backend.draining)
        response = service_pb2.SampleResponse(
            shortfall=shortfall, policy_version=buffer.row.policy_version
        )
        if lease is None:
            return response
        try:
            for experiences in sampled(backend.store, buffer, lease):
                response.experiences.extend(experiences)
            if response.ByteSize() > backend.limits.max_message_bytes:
                raise errors.ResourceExhaustedError(
                    f"one {buffer.delivery.consumer(lease.consumer).settings.unit} takes "
                    f"{response.ByteSize()} bytes, the limit server.max_message_bytes is "
                    f"{backend.limits.max_message_bytes}; use SampleStream, or raise the limit",
                    subject=request.consumer,
                )
        except BaseException:
            buffer.leasing.give_back([lease.id], "stream_closed")
            raise
        response.lease.CopyFrom(wire.lease_message(lease, time.time()))
        response.num_units = len(lease.units)
        return response

    def SampleStream(
        self, request_iterator: AsyncIterator[service_pb2.SampleStreamRequest], context: Context
    ) -> AsyncIterator[service_pb2.SampleStreamResponse]:
        """Lease batch after batch, as credits allow."""
        return SampleSession(self._backend, request_iterator).responses()

    async def Ack(
        self, request: service_pb2.AckRequest, context: Context
    ) -> service_pb2.AckResponse:
        """End a lease: consumed."""
        count = await self._backend.buffer(request.buffer).leasing.ack(request.lease_id)
        return service_pb2.AckResponse(num_experiences=count)

    async def Nack(
        self, request: service_pb2.NackRequest, context: Context
    ) -> service_pb2.NackResponse:
        """End a lease: offered again."""
        leasing = self._backend.buffer(request.buffer).leasing
        count = await leasing.nack(request.lease_id, reason=request.reason)
        return service_pb2.NackResponse(num_experiences=count)

    async def Get(
        self, request: service_pb2.GetRequest, context: Context
    ) -> service_pb2.GetResponse:
        """One experience."""
        return queries.get(self._backend.store, self._backend.buffer(request.buffer), request.uid)

    async def List(
        self, request: service_pb2.ListRequest, context: Context
    ) -> service_pb2.ListResponse:
        """A page of summaries."""
        return queries.list_page(self._backend.buffer(request.buffer), request)

    async def Annotate(
        self, request: service_pb2.AnnotateRequest, context: Context
    ) -> service_pb2.AnnotateResponse:
        """Add late fields."""
        self._backend.check_can_store()
        return await queries.annotate(self._backend.buffer(request.buffer), request)

    async def Delete(
        self, request: service_pb2.DeleteRequest, context: Context
    ) -> service_pb2.DeleteResponse:
        """Remove experiences."""
        return await queries.delete(self._backend.buffer(request.buffer), request)

    async def CreateBuffer(
        self, request: service_pb2.CreateBufferRequest, context: Context
    ) -> service_pb2.CreateBufferResponse:
        """Create a buffer."""
        buffer = await self._backend.registry.create(
            request.config.name, wire.settings_from(request.config), exist_ok=request.exist_ok
        )
        return service_pb2.CreateBufferResponse(buffer=wire.buffer_message(buffer))

    async def UpdateBuffer(
        self, request: service_pb2.UpdateBufferRequest, context: Context
    ) -> service_pb2.UpdateBufferResponse:
        """Change a buffer's settings."""
        buffer = await self._backend.registry.update(
            request.config.name, wire.changes_from(request)
        )
        return service_pb2.UpdateBufferResponse(buffer=wire.buffer_message(buffer))

    async def GetBuffer(
        self, request: service_pb2.GetBufferRequest, context: Context
    ) -> service_pb2.GetBufferResponse:
        """One buffer."""
        buffer = self._backend.buffer(request.name)
        return service_pb2.GetBufferResponse(buffer=wire.buffer_message(buffer))

    async def ListBuffers(
        self, request: service_pb2.ListBuffersRequest, context: Context
    ) -> service_pb2.ListBuffersResponse:
        """All buffers."""
        buffers = self._backend.registry.all()
        return service_pb2.ListBuffersResponse(buffers=map(wire.buffer_message, buffers))

    async def DeleteBuffer(
        self, request: service_pb2.DeleteBufferRequest, context: Context
    ) -> service_pb2.DeleteBufferResponse:
        """Remove a buffer."""
        num_items = await self._backend.registry.delete(request.name, force=request.force)
        return service_pb2.DeleteBufferResponse(num_items=num_items)

    async def PublishPolicyVersion(
        self, request: service_pb2.PublishPolicyVersionRequest, context: Context
    ) -> service_pb2.PublishPolicyVersionResponse:
        """Note the newest policy version."""
        if request.version < 0:
            raise errors.InvalidRequestError(
                f"version {request.version} must be at least 0", subject="version"
            )
        previous = await self._backend.registry.publish(request.buffer, request.version)
        return service_pb2.PublishPolicyVersionResponse(previous_version=previous)

    async def GetStats(
        self, request: service_pb2.GetStatsRequest, context: Context
    ) -> service_pb2.GetStatsResponse:
        """Counts and waits."""
        registry = self._backend.registry
        buffers = [registry.get(request.buffer)] if request.buffer else registry.all()
        return service_pb2.GetStatsResponse(
            buffers=[wire.stats_message(buffer_stats(buffer)) for buffer in buffers],
            server_version=__version__,
            uptime_seconds=time.monotonic() - self._started,
        )
