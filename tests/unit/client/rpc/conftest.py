"""A server with scripted failures, for the client's retry and reconnection logic alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from experience_buffer import status, trxp
from experience_buffer.errors import ExperienceBufferError, LeaseNotFoundError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import service_pb2_grpc, types_pb2


class ScriptedServer(service_pb2_grpc.ExperienceBufferServicer):
    """Answers calls from a script; keeps what was pushed, in memory, by uid."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failures: deque[ExperienceBufferError] = deque()
        """Raised by the next unary calls and stream openings, one each."""
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.refuse: Callable[[str], bool] = lambda uid: False
        self.computation: dict[str, Any] = {}
        """What `Get` says of every experience."""
        self.break_push_after: deque[int] = deque()
        """Per push stream: requests stored before it breaks without answering the last one."""
        self.push_errors: deque[ExperienceBufferError] = deque()
        """Answers to the next requests on a push stream, in place of storing them."""
        self.batches: deque[list[bytes]] = deque()
        """What sample streams deliver, a frame per experience."""
        self.break_sample_after: deque[int] = deque()
        """Per sample stream: batches sent before it breaks."""
        self.credits: list[int] = []
        self.acked: list[int] = []
        self.nacked: list[int] = []
        self.lost_leases: set[int] = set()
        self.next_lease = 1
        self.changed = threading.Condition()
        """Wakes the sample streams: notify it after adding to `batches`."""
        self.open_streams = threading.Semaphore(0)
        self.ended_streams = threading.Semaphore(0)

    def _begin(self, request: Any, context: Any) -> None:
        with self.lock:
            if request is not None:
                self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            failure = self.failures.popleft() if self.failures else None
        if failure is not None:
            context.abort_with_status(status.to_status(failure))

    def _store(self, request: pb.PushRequest) -> pb.PushResponse:
        response = pb.PushResponse(policy_version=17)
        for index, payload in enumerate(trxp.split(request.payload)):
            [item] = trxp.read(payload)
            assert not isinstance(item, ExperienceBufferError)
            outcome = response.outcomes.add(index=index, uid=item.eid.uid)
            if self.refuse(item.eid.uid):
                outcome.status = types_pb2.PUSH_STATUS_REFUSED
                outcome.reason = types_pb2.REFUSAL_REASON_LATE
                outcome.message = "its group closed"
            elif item.eid.uid in self.stored:
                outcome.status = types_pb2.PUSH_STATUS_DUPLICATE
            else:
                self.stored[item.eid.uid] = payload
                outcome.status = types_pb2.PUSH_STATUS_STORED
        for tombstone in request.tombstones:
            outcome = response.outcomes.add(index=len(response.outcomes))
            outcome.status = types_pb2.PUSH_STATUS_STORED
            outcome.uid = f"{tombstone.id.batch}/{tombstone.id.task}"
        return response

    def Push(self, request: pb.PushRequest, context: Any) -> pb.PushResponse:
        self._begin(request, context)
        return self._store(request)

    def PushStream(self, request_iterator: Any, context: Any) -> Iterator[pb.PushStreamResponse]:
        self._begin(None, context)
        limit = self.break_push_after.popleft() if self.break_push_after else None
        for count, request in enumerate(request_iterator, 1):
            with self.lock:
                self.requests.append(request)
            if self.push_errors:
                error = status.to_request_error(self.push_errors.popleft())
                yield pb.PushStreamResponse(sequence=request.sequence, error=error)
                continue
            response = self._store(request.push)
            if count == limit:
                context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
            yield pb.PushStreamResponse(sequence=request.sequence, response=response)

    def Sample(self, request: pb.SampleRequest, context: Any) -> pb.SampleResponse:
        self._begin(request, context)
        if not self.batches:
            return pb.SampleResponse(shortfall="0 ready of 64")
        payloads = self.batches.popleft()
        return pb.SampleResponse(
            lease=self._lease(request.consumer),
            experiences=[self._experience(payload) for payload in payloads],
            num_units=len(payloads),
            policy_version=17,
        )

    def SampleStream(
        self, request_iterator: Any, context: Any
    ) -> Iterator[pb.SampleStreamResponse]:
        self._begin(None, context)
        outbox: deque[pb.SampleStreamResponse] = deque()
        changed = self.changed
        state = {"credits": 0, "over": False}

        def over() -> None:
            with changed:
                state["over"] = True
                changed.notify_all()

        def hear() -> None:
            try:
                for request in request_iterator:
                    with changed:
                        kind = request.WhichOneof("message")
                        if kind == "open":
                            self.requests.append(request.open)
                        elif kind == "credits":
                            self.credits.append(request.credits)
                            state["credits"] += request.credits
                        elif kind == "ack" and not state["over"]:
                            outbox.extend(self._end(lease) for lease in request.ack.ids)
                        changed.notify_all()
            except grpc.RpcError:
                pass
            over()

        context.add_callback(over)
        threading.Thread(target=hear, daemon=True).start()
        self.open_streams.release()
        limit = self.break_sample_after.popleft() if self.break_sample_after else None
        num_sent, leases = 0, []
        try:
            while True:
                with changed:
                    changed.wait_for(
                        lambda: outbox or state["over"] or (state["credits"] and self.batches)
                    )
                    if state["over"]:
                        return
                    messages = [outbox.popleft() for _ in range(len(outbox))]
                    if not messages:
                        state["credits"] -= 1
                        lease = self._lease("trainer")
                        leases.append(lease.id)
                        messages = list(self._frames(lease, self.batches.popleft()))
                        num_sent += 1
                yield from messages
                if num_sent == limit:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
        finally:
            over()
            self.lost_leases.update(set(leases) - set(self.acked))
            self.ended_streams.release()

    def _frames(
        self, lease: types_pb2.Lease, payloads: list[bytes]
    ) -> Iterator[pb.SampleStreamResponse]:
        yield pb.SampleStreamResponse(waiting="soon")
        for place, payload in enumerate(payloads):
            last = place == len(payloads) - 1
            frame = pb.SampleFrame(
                lease=lease,
                experiences=[self._experience(payload)],
                last=last,
                num_units=len(payloads) if last else 0,
            )
            yield pb.SampleStreamResponse(frame=frame)

    def _end(self, lease_id: int) -> pb.SampleStreamResponse:
        self.acked.append(lease_id)
        return pb.SampleStreamResponse(lease_result=pb.LeaseResult(lease_id=lease_id))

    def Ack(self, request: pb.AckRequest, context: Any) -> pb.AckResponse:
        self._begin(request, context)
        if request.lease_id in self.lost_leases:
            error = LeaseNotFoundError("it was given back", subject=str(request.lease_id))
            context.abort_with_status(status.to_status(error))
        self.acked.append(request.lease_id)
        return pb.AckResponse(num_experiences=3)

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

    def Nack(self, request: pb.NackRequest, context: Any) -> pb.NackResponse:
        self._begin(request, context)
        self.nacked.append(request.lease_id)
        return pb.NackResponse(num_experiences=5)

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
        return pb.GetStatsResponse(server_version="9.8.7", buffers=[buffer])

    def _lease(self, consumer: str) -> types_pb2.Lease:
        lease = types_pb2.Lease(id=self.next_lease, consumer=consumer, expires_in_seconds=300)
        self.next_lease += 1
        return lease

    def _experience(self, payload: bytes) -> types_pb2.SampledExperience:
        [item] = trxp.read(payload)
        assert not isinstance(item, ExperienceBufferError)
        return types_pb2.SampledExperience(
            uid=item.eid.uid,
            group=item.eid.tid,
            payload=payload,
            num_deliveries=1,
            staleness=2,
            flags=["singleton", "bootstrapped"] if item.eid.run == 1 else [],
        )

    def _unused(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    SealGroup = DropGroup = GetBuffer = ListBuffers = _unused
    DeleteBuffer = PublishPolicyVersion = _unused


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    """A running scripted server and its address."""
    script = ScriptedServer()
    running = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_ExperienceBufferServicer_to_server(script, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield script, f"127.0.0.1:{port}"
    running.stop(None).wait()
