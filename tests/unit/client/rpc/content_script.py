"""The part of the scripted server that answers calls about contents and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2


class ContentScript:
    """Keeps what was pushed, in memory, by uid; its `_begin` raises the scripted failures."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.refuse: Callable[[str], bool] = lambda uid: False
        self.computation: dict[str, Any] = {}
        """What `Get` says of every experience."""
        self.waiting_for = ""
        """What `GetStats` says that the trainer waits for."""

    def _begin(self, request: Any, context: Any) -> None:
        raise NotImplementedError

    def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        self._begin(request, context)
        start = int(request.page_token or 0)
        end = start + request.page_size
        uids = sorted(self.stored)
        return pb.ListResponse(
            experiences=[
                types_pb2.ExperienceSummary(uid=uid, state=types_pb2.EXPERIENCE_STATE_READY)
                for uid in uids[start:end]
            ],
            next_page_token=str(end) if end < len(uids) else "",
        )

    def CreateBuffer(self, request: Any, context: Any) -> pb.CreateBufferResponse:
        self._begin(request, context)
        response = pb.CreateBufferResponse()
        response.buffer.config.CopyFrom(request.config)
        return response

    def Annotate(self, request: pb.AnnotateRequest, context: Any) -> pb.AnnotateResponse:
        self._begin(request, context)
        response = pb.AnnotateResponse()
        for annotation in request.annotations:
            outcome = response.outcomes.add(uid=annotation.uid)
            if self.refuse(annotation.uid):
                outcome.refusal = types_pb2.ANNOTATE_REFUSAL_DELIVERED
                outcome.message = "lease 17 of 'trainer' holds it"
        return response

    def Get(self, request: pb.GetRequest, context: Any) -> pb.GetResponse:
        self._begin(request, context)
        response = pb.GetResponse(payload=self.stored[request.uid])
        response.summary.uid = request.uid
        response.summary.state = types_pb2.EXPERIENCE_STATE_WAITING_FOR_FIELDS
        if self.computation:
            response.computation.update(self.computation)
        return response

    def UpdateBuffer(self, request: Any, context: Any) -> pb.UpdateBufferResponse:
        self._begin(request, context)
        response = pb.UpdateBufferResponse()
        response.buffer.config.CopyFrom(request.config)
        return response

    def Delete(self, request: Any, context: Any) -> pb.DeleteResponse:
        self._begin(request, context)
        return pb.DeleteResponse(num_deleted=2, unknown_uids=["x"])

    def GetStats(self, request: Any, context: Any) -> pb.GetStatsResponse:
        self._begin(request, context)
        buffer = pb.BufferStats(
            name="math", num_waiting_for_fields=7, computing_waits_for="values of 7 experiences"
        )
        buffer.consumers.add(name="trainer", waiting_for=self.waiting_for, last_step=0)
        return pb.GetStatsResponse(server_version="9.8.7", buffers=[buffer])

    def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        self._begin(request, context)
        return pb.SnapshotResponse(
            name=f"snapshot-{request.label}",
            num_bytes=3,
            num_experiences=5,
            seconds=7.0,
            create_time=11.0,
            removed=["snapshot-old"],
        )
