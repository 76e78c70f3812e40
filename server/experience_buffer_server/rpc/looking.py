"""The calls that look and change nothing, of the gRPC service. No rules here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from experience_buffer.v1 import looking_pb2, service_pb2, service_pb2_grpc
from experience_buffer_server import __version__
from experience_buffer_server.buffer import past, present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.inspection.glance import Glance
from experience_buffer_server.buffer.inspection.pages import number_of, page_size
from experience_buffer_server.rpc import archived, inspection, messages
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.scanning import Scanning, Scans, frames
from experience_buffer_server.rpc.step_scan import StepScanning
from experience_buffer_server.runtime.callers import caller_of, current_caller
from experience_buffer_server.runtime.response_bytes import Hold

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_STEPS_AT_ONCE, _DEPARTURES_AT_ONCE = 20, 100
_Response = TypeVar("_Response", bound=Message)
_SMALL_RESPONSE_BYTES = 4096
"""Of a response without payload."""


class Looking(service_pb2_grpc.ExperienceBufferServicer):
    """What can be asked without changing anything; errors become statuses in the interceptor."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._started, self._start_time = time.monotonic(), time.time()
        self._scans = Scans()

    async def Get(
        self, request: service_pb2.GetRequest, context: Context
    ) -> service_pb2.GetResponse:
        """One experience."""
        buffer = self._backend.buffer(request.buffer)
        entry = buffer.find(request.uid)
        num_bytes = 0 if entry is None else entry.record.payload_bytes
        hold = self._backend.responses.take(caller_of(), num_bytes + _SMALL_RESPONSE_BYTES)
        until_sent(context, hold)
        if buffer.stored(request.uid) is None:
            archivist = self._backend.registry.archivist
            found = await archived.get(archivist, buffer, request.uid)
            if found is not None:
                return self._held(found, context)
        return await inspection.get(self._backend.store, buffer, request.uid)

    async def List(
        self, request: service_pb2.ListRequest, context: Context
    ) -> service_pb2.ListResponse:
        """A page of summaries."""
        buffer = self._backend.buffer(request.buffer)
        if request.archived:
            size, archivist = page_size(request.page_size), self._backend.registry.archivist
            response = await archived.list_page(archivist, buffer, request, size)
        else:
            async with self._backend.looks:
                response = await inspection.list_page(buffer, request)
        return self._held(response, context)

    async def GetStats(
        self, request: service_pb2.GetStatsRequest, context: Context
    ) -> service_pb2.GetStatsResponse:
        """Counts and waits."""
        if request.buffer:
            buffers = [self._backend.buffer(request.buffer)]
        else:
            buffers = self.visible_buffers()
        backend = self._backend
        free_bytes = await asyncio.to_thread(backend.store.disk_free_bytes)
        response = service_pb2.GetStatsResponse(
            server_version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            start_time=self._start_time,
            address=backend.address,
            disk=messages.message_of(service_pb2.DiskStats, backend.fullness.told(free_bytes)),
        )
        if len(self.visible_buffers()) < len(backend.registry.all()):
            response.disk.place = ""  # For those who may see everything.
        glance = Glance()
        for buffer in buffers:
            response.buffers.append(messages.stats_message(buffer.stats()))
            await glance.breathe()
        return response

    async def ListGroups(
        self, request: looking_pb2.ListGroupsRequest, context: Context
    ) -> looking_pb2.ListGroupsResponse:
        """Groups with their members."""
        buffer = self._backend.buffer(request.buffer)
        wanted = inspection.groups_wanted(request)
        async with self._backend.looks:
            found, token = await present.group_page(buffer, wanted)
            groups = await _each(looking_pb2.GroupInfo, found)
        response = looking_pb2.ListGroupsResponse(groups=groups, next_page_token=token)
        return self._held(response, context)

    async def GetGroup(
        self, request: looking_pb2.GetGroupRequest, context: Context
    ) -> looking_pb2.GetGroupResponse:
        """One group, with how its advantages were computed."""
        buffer = self._backend.buffer(request.buffer)
        async with self._backend.looks:
            found = await present.group(buffer, request.group)
        response = looking_pb2.GetGroupResponse(
            group=messages.message_of(looking_pb2.GroupInfo, found)
        )
        return self._held(response, context)

    async def ListLeases(
        self, request: looking_pb2.ListLeasesRequest, context: Context
    ) -> looking_pb2.ListLeasesResponse:
        """Open leases."""
        buffer = self._backend.buffer(request.buffer)
        size, after = page_size(request.page_size), number_of(request.page_token, 0)
        async with self._backend.looks:
            page = await present.lease_page(
                buffer, consumer=request.consumer, lease_id=request.lease_id, after=after, size=size
            )
            leases = await _each(looking_pb2.LeaseInfo, page.found)
        response = looking_pb2.ListLeasesResponse(leases=leases, next_page_token=page.token)
        return self._held(response, context)

    async def ListSteps(
        self, request: looking_pb2.ListStepsRequest, context: Context
    ) -> looking_pb2.ListStepsResponse:
        """What each training step has consumed."""
        buffer = self._backend.buffer(request.buffer)
        step = request.step if request.HasField("step") else None
        response = looking_pb2.ListStepsResponse()
        for number, info in enumerate(past.steps(buffer, request.consumer, step, request.limit)):
            response.steps.append(messages.message_of(looking_pb2.StepInfo, info))
            if number % _STEPS_AT_ONCE == _STEPS_AT_ONCE - 1:
                await asyncio.sleep(0)  # Others are answered in between.
        return response

    async def ListDepartures(
        self, request: looking_pb2.ListDeparturesRequest, context: Context
    ) -> looking_pb2.ListDeparturesResponse:
        """What left lately, and why."""
        found = past.departures(
            self._backend.buffer(request.buffer),
            reason=request.reason,
            unused_only=request.unused_only,
            limit=request.limit,
        )
        few = dataclasses.replace(found, departures=())
        response = messages.message_of(looking_pb2.ListDeparturesResponse, few)
        for number, one in enumerate(found.departures, 1):
            response.departures.append(messages.message_of(looking_pb2.Departure, one))
            if number % _DEPARTURES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return response

    async def GetTrends(
        self, request: looking_pb2.GetTrendsRequest, context: Context
    ) -> looking_pb2.GetTrendsResponse:
        """The last minutes."""
        found = past.trends(self._backend.buffer(request.buffer), request.seconds)
        return messages.message_of(looking_pb2.GetTrendsResponse, found)

    def Scan(
        self, request: service_pb2.ScanRequest, context: Context
    ) -> AsyncIterator[service_pb2.ScanResponse]:
        """Stored experiences with their payloads."""
        return self._scan(request)

    async def _scan(
        self, request: service_pb2.ScanRequest
    ) -> AsyncIterator[service_pb2.ScanResponse]:
        buffer = self._backend.buffer(request.buffer)
        with self._scans.entered():
            if request.delivered:
                of_step = StepScanning(self._backend, buffer, request)
                await of_step.find()
                scanning: Scanning = of_step
            else:
                scanning = Scanning(self._backend, buffer, request)
            async with contextlib.aclosing(frames(self._backend, scanning)) as found:
                async for frame in found:
                    yield frame

    def _held(self, response: _Response, context: Context) -> _Response:
        """An answer, of which the memory counts until it is sent.

        Raises:
            ResourceExhaustedError: The caller's answers that aren't sent yet have too much of it.
        """
        until_sent(context, self._backend.responses.take(caller_of(), response.ByteSize()))
        return response

    def visible_buffers(self) -> list[Buffer]:
        """All buffers that the caller may see, by name."""
        covers = current_caller().covers
        return [buffer for buffer in self._backend.registry.all() if covers(buffer.name)]


async def _each(kind: type[_Response], values: Sequence[Any]) -> list[_Response]:
    """The messages of values, with others answered in between."""
    glance, made = Glance(), []
    for value in values:
        made.append(messages.message_of(kind, value))
        await glance.breathe()
    return made


def until_sent(context: Context, hold: Hold) -> None:
    """Release it with the end of the call.

    What a handler returns stays in memory until it is sent: for ever, to a reader that stands still.
    """

    def ended(_: object) -> None:
        hold.release()

    # The stubs ask for a class where the server takes any function.
    callback: Any = ended
    context.add_done_callback(callback)
