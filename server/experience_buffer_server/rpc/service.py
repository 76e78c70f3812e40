"""The gRPC service: from messages to the buffers and back. No rules here."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer import errors
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.state.entries import MAX_NOTE
from experience_buffer_server.rpc import archived, config_messages, inspection, messages
from experience_buffer_server.rpc.abandoned_samples import SampleCall, SampleCalls
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.looking import Looking, until_sent
from experience_buffer_server.rpc.push_codec import write_push
from experience_buffer_server.rpc.push_stream import PushSession, policy_versions
from experience_buffer_server.rpc.sample_call import sample
from experience_buffer_server.rpc.sample_stream import SampleSession
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import named

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_SMALL_RESPONSE_BYTES = 4096
"""Of a response without payload."""


class Service(Looking):
    """The servicer; errors become statuses in the interceptor."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._calls = SampleCalls()

    # Pushes don't come and go as messages, which the stubs ask for: see `push_codec`.
    async def Push(self, request: Any, context: Context) -> Any:
        """Store experiences."""
        pushed = await self._backend.push(request, remaining_seconds=context.time_remaining())
        return write_push(pushed)

    def PushStream(self, request_iterator: Any, context: Context) -> AsyncIterator[Any]:
        """Store experiences, many requests on one stream."""
        return PushSession(self._backend, request_iterator).responses()

    async def SealGroup(
        self, request: service_pb2.SealGroupRequest, context: Context
    ) -> service_pb2.SealGroupResponse:
        """Close a group."""
        buffer = self._backend.buffer(request.buffer)
        group = await buffer.seal(request.group, request.group_size)
        return service_pb2.SealGroupResponse(
            num_members=group.num_members, group_size=group.row.size
        )

    async def DropGroup(
        self, request: service_pb2.DropGroupRequest, context: Context
    ) -> service_pb2.DropGroupResponse:
        """Discard a group."""
        buffer = self._backend.buffer(request.buffer)
        num_dropped = await buffer.drop(request.group, request.reason[:MAX_NOTE])
        return service_pb2.DropGroupResponse(num_dropped=num_dropped)

    async def Sample(self, request: service_pb2.SampleRequest, context: Context) -> Any:
        """Lease one batch; the response as bytes."""
        remaining = context.time_remaining()
        timeout = request.timeout_seconds
        if remaining is not None:
            # Answer before the client's deadline: a batch that comes after it is lost to its lease.
            timeout = min(timeout, max(remaining - 0.1, 0.0))
        named(request.holder)
        with self._calls.entered(request.buffer, request.call_id) as call:
            _give_up_with(context, call)
            return await sample(
                self._backend,
                request,
                timeout_seconds=timeout,
                until_sent=functools.partial(until_sent, context),
                leased=call.leased,
            )

    def SampleStream(
        self, request_iterator: AsyncIterator[service_pb2.SampleStreamRequest], context: Context
    ) -> AsyncIterator[Any]:
        """Lease batch after batch, as credits allow; the responses as bytes."""
        return SampleSession(self._backend, request_iterator).responses()

    async def Ack(
        self, request: service_pb2.AckRequest, context: Context
    ) -> service_pb2.AckResponse:
        """End a lease: consumed."""
        lease = await self._backend.buffer(request.buffer).ack(
            request.lease_id,
            step=request.step if request.HasField("step") else None,
            rank=request.rank if request.HasField("rank") else None,
        )
        return service_pb2.AckResponse(
            num_experiences=lease.num_experiences, num_waiting_ranks=lease.num_waiting_ranks
        )

    async def Nack(
        self, request: service_pb2.NackRequest, context: Context
    ) -> service_pb2.NackResponse:
        """End a lease: offered again."""
        buffer = self._backend.buffer(request.buffer)
        if request.call_id:
            num_experiences = self._calls.give_up(request.buffer, request.call_id)
            return service_pb2.NackResponse(num_experiences=num_experiences)
        count = await buffer.nack(
            request.lease_id, reason=request.reason[:MAX_NOTE], unread=request.unread
        )
        return service_pb2.NackResponse(num_experiences=count)

    async def ExtendLease(
        self, request: service_pb2.ExtendLeaseRequest, context: Context
    ) -> service_pb2.ExtendLeaseResponse:
        """Give a lease more time."""
        buffer = self._backend.buffer(request.buffer)
        lease = await buffer.extend(request.lease_id, request.lease_seconds)
        return service_pb2.ExtendLeaseResponse(lease=messages.lease_message(lease, clock.now()))

    async def Rewind(
        self, request: service_pb2.RewindRequest, context: Context
    ) -> service_pb2.RewindResponse:
        """Go back to a training step."""
        buffer = self._backend.buffer(request.buffer)
        rewound = await buffer.rewind(request.consumer, request.step)
        return messages.filled(service_pb2.RewindResponse, rewound)

    async def DeclareSafe(
        self, request: service_pb2.DeclareSafeRequest, context: Context
    ) -> service_pb2.DeclareSafeResponse:
        """Keep acknowledged experiences no longer."""
        buffer = self._backend.buffer(request.buffer)
        released = await buffer.declare_safe(request.consumer, request.step)
        return messages.filled(service_pb2.DeclareSafeResponse, released)

    async def ReleaseQuarantined(
        self, request: service_pb2.ReleaseQuarantinedRequest, context: Context
    ) -> service_pb2.ReleaseQuarantinedResponse:
        """Offer quarantined units again."""
        buffer = self._backend.buffer(request.buffer)
        count = await buffer.release(request.consumer, request.uids)
        return service_pb2.ReleaseQuarantinedResponse(num_units=count)

    async def UpdatePriorities(
        self, request: service_pb2.UpdatePrioritiesRequest, context: Context
    ) -> service_pb2.UpdatePrioritiesResponse:
        """Set priorities."""
        buffer = self._backend.buffer(request.buffer)
        updated = await buffer.update_priorities(messages.priorities_from(request.updates))
        return messages.filled(service_pb2.UpdatePrioritiesResponse, updated)

    async def Annotate(
        self, request: service_pb2.AnnotateRequest, context: Context
    ) -> service_pb2.AnnotateResponse:
        """Add late fields."""
        self._backend.check_can_store()
        buffer = self._backend.buffer(request.buffer)
        with self._backend.pending(buffer, request.ByteSize()):
            # Before anything is made of them.
            buffer.check_annotations(len(request.annotations))
            outcomes = await buffer.annotate(
                list(map(messages.annotation_from, request.annotations))
            )
            archivist = self._backend.registry.archivist
            await archived.annotate(archivist, buffer, request.annotations, outcomes, clock.now())
        return service_pb2.AnnotateResponse(
            outcomes=map(messages.annotate_outcome_message, outcomes)
        )

    async def Delete(
        self, request: service_pb2.DeleteRequest, context: Context
    ) -> service_pb2.DeleteResponse:
        """Remove experiences."""
        buffer = self._backend.buffer(request.buffer)
        response = await inspection.delete(buffer, request)
        await archived.delete(self._backend.registry.archivist, buffer, response)
        return response

    async def CreateBuffer(
        self, request: service_pb2.CreateBufferRequest, context: Context
    ) -> service_pb2.CreateBufferResponse:
        """Create a buffer."""
        buffer = await self._backend.registry.create(
            request.config.name,
            config_messages.settings_from(request.config),
            exist_ok=request.exist_ok,
        )
        return service_pb2.CreateBufferResponse(buffer=config_messages.buffer_message(buffer))

    async def UpdateBuffer(
        self, request: service_pb2.UpdateBufferRequest, context: Context
    ) -> service_pb2.UpdateBufferResponse:
        """Change a buffer's settings."""
        buffer = await self._backend.registry.update(
            request.config.name, config_messages.changes_from(request)
        )
        return service_pb2.UpdateBufferResponse(buffer=config_messages.buffer_message(buffer))

    async def GetBuffer(
        self, request: service_pb2.GetBufferRequest, context: Context
    ) -> service_pb2.GetBufferResponse:
        """One buffer."""
        buffer = self._backend.buffer(request.name)
        return service_pb2.GetBufferResponse(buffer=config_messages.buffer_message(buffer))

    async def ListBuffers(
        self, request: service_pb2.ListBuffersRequest, context: Context
    ) -> service_pb2.ListBuffersResponse:
        """All buffers."""
        buffers = self.visible_buffers()
        return service_pb2.ListBuffersResponse(buffers=map(config_messages.buffer_message, buffers))

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
        previous = await self._backend.buffer(request.buffer).publish(request.version)
        return service_pb2.PublishPolicyVersionResponse(previous_version=previous)

    def WatchPolicyVersion(
        self, request: service_pb2.WatchPolicyVersionRequest, context: Context
    ) -> AsyncIterator[service_pb2.WatchPolicyVersionResponse]:
        """The published version, now and whenever it changes."""
        return policy_versions(self._backend, request.buffer)

    async def ReserveGroups(
        self, request: service_pb2.ReserveGroupsRequest, context: Context
    ) -> service_pb2.ReserveGroupsResponse:
        """Admit new tasks."""
        buffer = self._backend.buffer(request.buffer)
        reserved = buffer.reserve(request.groups, ttl_seconds=request.ttl_seconds)
        return messages.filled(service_pb2.ReserveGroupsResponse, reserved)

    async def Snapshot(
        self, request: service_pb2.SnapshotRequest, context: Context
    ) -> service_pb2.SnapshotResponse:
        """Take a snapshot of the store."""
        if self._backend.snapshots is None:
            raise errors.UnsupportedError(
                "this server's store is in memory and has no snapshots: serve without --memory",
                subject="snapshots",
            )
        taken = await self._backend.snapshots.take(request.label)
        return messages.filled(service_pb2.SnapshotResponse, taken)


def _give_up_with(context: Context, call: SampleCall) -> None:
    """Offer again what a call has leased if it is cancelled, or cut off, before its answer has left."""

    def ended(ended: Any) -> None:
        if ended.cancelled():
            call.take_back()

    # The stubs ask for a class where the server takes any function.
    callback: Any = ended
    context.add_done_callback(callback)
