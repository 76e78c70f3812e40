"""A server with scripted failures, for the client's retry and reconnection logic alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from experience_buffer import Client, packed, status, trxp
from experience_buffer.errors import ExperienceBufferError, LeaseNotFoundError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import service_pb2_grpc, types_pb2
from tests.unit.client.rpc.content_script import ContentScript
from tests.unit.client.rpc.delivery_script import DeliveryScript
from tests.unit.client.rpc.pushed import FAST


class ScriptedServer(ContentScript, DeliveryScript, service_pb2_grpc.ExperienceBufferServicer):
    """Answers calls from a script; keeps what was pushed, in memory, by uid."""

    def __init__(self) -> None:
        ContentScript.__init__(self)
        DeliveryScript.__init__(self)
        self.lock = threading.Lock()
        self.failures: deque[ExperienceBufferError | grpc.StatusCode] = deque()
        """Raised by the next unary calls and stream openings, one each; a code alone is what gRPC
        itself answers with."""
        self.begun = threading.Semaphore(0)
        """Calls that have come so far; they wait for the lock then."""
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.break_push_after: deque[int] = deque()
        """Per push stream: requests stored before it breaks without answering the last one."""
        self.push_errors: deque[ExperienceBufferError] = deque()
        """Answers to the next requests on a push stream, in place of storing them."""
        self.batches: deque[list[bytes]] = deque()
        """What sample streams deliver, a frame per experience."""
        self.break_sample_after: deque[int] = deque()
        """Per sample stream: batches sent before it breaks."""
        self.break_when_taken = False
        """It breaks once the reader has taken what came, which may be dropped otherwise."""
        self.credits: list[int] = []
        self.byte_credits: list[int] = []
        self.notes: deque[str] = deque()
        """What sample streams say first that they wait for."""
        self.acked: list[int] = []
        self.nacked: list[int] = []
        self.lost_leases: set[int] = set()
        self.next_lease = 1
        self.changed = threading.Condition()
        """Wakes the sample streams: notify it after adding to `batches`."""
        self.open_streams = threading.Semaphore(0)
        self.ended_streams = threading.Semaphore(0)

    def _begin(self, request: Any, context: Any) -> None:
        self.begun.release()
        with self.lock:
            if request is not None:
                self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            failure = self.failures.popleft() if self.failures else None
        if isinstance(failure, grpc.StatusCode):
            context.abort(failure, failure.name)
        elif failure is not None:
            context.abort_with_status(status.to_status(failure))

    @property
    def pushes(self) -> list[pb.PushRequest]:
        """What was pushed, by calls or on a stream."""
        return [getattr(request, "push", request) for request in self.requests]

    def singles(self, request: pb.PushRequest) -> list[bytes]:
        """Each pushed experience's payload."""
        payloads = filter(None, (request.payload, *request.payloads))
        return [single for payload in payloads for single in trxp.split(payload)]

    def _store(self, request: pb.PushRequest) -> pb.PushResponse:
        response = pb.PushResponse(policy_version=17)
        for index, payload in enumerate(self.singles(request)):
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
        # It has no memory to share, and says nothing to who asks.
        pushes = (request for request in request_iterator if not request.HasField("memory"))
        for count, request in enumerate(pushes, 1):
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
        response = pb.SampleResponse(
            lease=self._lease(request.consumer, request.rank_of.world_size),
            num_units=len(payloads),
            policy_version=17,
        )
        if request.format == types_pb2.SAMPLE_FORMAT_PACKED:
            response.packed = self._pack(payloads)
        else:
            response.experiences.extend(map(self._experience, payloads))
        return response

    def SampleStream(
        self, request_iterator: Any, context: Any
    ) -> Iterator[pb.SampleStreamResponse]:
        self._begin(None, context)
        outbox: deque[pb.SampleStreamResponse] = deque()
        changed = self.changed
        state: dict[str, Any] = {"credits": 0, "over": False, "open": None}

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
                            state["open"] = request.open
                            outbox.extend(
                                pb.SampleStreamResponse(waiting=note) for note in self.notes
                            )
                        elif kind == "credits":
                            self.credits.append(request.credits)
                            state["credits"] += request.credits
                        elif kind == "byte_credits":
                            self.byte_credits.append(request.byte_credits)
                        elif kind == "ack" and not state["over"]:
                            step = request.ack.step if request.ack.HasField("step") else None
                            outbox.extend(self._end(lease, step) for lease in request.ack.ids)
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
                        opened = state["open"]
                        lease = self._lease("trainer", opened.rank_of.world_size)
                        leases.append(lease.id)
                        messages = list(self._frames(lease, self.batches.popleft(), opened))
                        num_sent += 1
                yield from messages
                if num_sent == limit:
                    with changed:
                        changed.wait_for(
                            lambda: state["over"] or state["credits"] or not self.break_when_taken
                        )
                    context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
        finally:
            over()
            self.lost_leases.update(set(leases) - set(self.acked))
            self.ended_streams.release()

    def _frames(
        self, lease: types_pb2.Lease, payloads: list[bytes], opened: pb.SampleStreamOpen
    ) -> Iterator[pb.SampleStreamResponse]:
        yield pb.SampleStreamResponse(waiting="soon")
        if opened.format == types_pb2.SAMPLE_FORMAT_PACKED:
            whole = self._pack(payloads)
            frames = [pb.SampleFrame(packed=whole[at : at + 97]) for at in range(0, len(whole), 97)]
        else:
            frames = [pb.SampleFrame(experiences=[self._experience(each)]) for each in payloads]
        frames = frames or [pb.SampleFrame()]
        frames[-1].last = True
        frames[-1].num_units = len(payloads)
        frames[-1].batch_bytes = sum(map(len, payloads))
        for frame in frames:
            frame.lease.CopyFrom(lease)
            yield pb.SampleStreamResponse(frame=frame)

    def _end(self, lease_id: int, step: int | None) -> pb.SampleStreamResponse:
        self.acked.append(lease_id)
        self.acks.append((lease_id, step, None))
        return pb.SampleStreamResponse(lease_result=pb.LeaseResult(lease_id=lease_id))

    def Ack(self, request: pb.AckRequest, context: Any) -> pb.AckResponse:
        self._begin(request, context)
        if request.lease_id in self.lost_leases:
            error = LeaseNotFoundError("it was given back", subject=str(request.lease_id))
            context.abort_with_status(status.to_status(error))
        self.acked.append(request.lease_id)
        step = request.step if request.HasField("step") else None
        rank = request.rank if request.HasField("rank") else None
        self.acks.append((request.lease_id, step, rank))
        return pb.AckResponse(num_experiences=3, num_waiting_ranks=self.num_waiting_ranks)

    def Nack(self, request: pb.NackRequest, context: Any) -> pb.NackResponse:
        self._begin(request, context)
        self.nacked.append(request.lease_id)
        return pb.NackResponse(num_experiences=5)

    def _lease(self, consumer: str, world_size: int = 0) -> types_pb2.Lease:
        lease = types_pb2.Lease(
            id=self.next_lease,
            consumer=consumer,
            expires_in_seconds=300,
            world_size=world_size,
        )
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
            probability=0.25,
            times_sampled=11,
            generation=13 + item.eid.run,
        )

    def _pack(self, payloads: list[bytes]) -> bytes:
        rows = [
            packed.PackedRow(uid=uid(payload), payload=payload, tensors={}) for payload in payloads
        ]
        return b"".join(packed.pack(rows))

    def _unused(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    SealGroup = DropGroup = GetBuffer = ListBuffers = _unused
    DeleteBuffer = PublishPolicyVersion = _unused


def uid(payload: bytes) -> str:
    [item] = trxp.read(payload)
    assert not isinstance(item, ExperienceBufferError)
    return item.eid.uid


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


@pytest.fixture
def script(server: tuple[ScriptedServer, str]) -> ScriptedServer:
    """What the server does and has been asked."""
    return server[0]


@pytest.fixture
def buffer(server: tuple[ScriptedServer, str], connect: Any) -> Iterator[Client]:
    """A client of either kind; see `connect`."""
    with connect(server[1], token="secret", options=FAST) as client:
        yield client
