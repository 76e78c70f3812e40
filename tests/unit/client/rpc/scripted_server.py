"""A server with scripted failures, for the client's retry and reconnection logic alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from experience_buffer import packed, status, trxp
from experience_buffer.errors import ExperienceBufferError, LeaseNotFoundError
from experience_buffer.v1 import config_pb2, service_pb2_grpc, types_pb2
from experience_buffer.v1 import service_pb2 as pb
from tests.unit.client.rpc.pushed import item_of


def answered(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A unary call that is answered with what this returns, unless a failure is scripted."""

    def call(self: ScriptedServer, request: Any, context: Any) -> Any:
        self._begin(request, context)
        try:
            return make(self, request)
        except ExperienceBufferError as error:
            context.abort_with_status(status.to_status(error))

    return call


class ScriptedServer(service_pb2_grpc.ExperienceBufferServicer):
    """Answers calls from a script, with distinct primes; keeps what was pushed, in memory, by uid."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failures: deque[ExperienceBufferError | grpc.StatusCode] = deque()
        """Raised by the next unary calls and stream openings, one each; a code alone is what gRPC
        itself answers with."""
        self.begun = threading.Semaphore(0)
        """Calls that have come so far; they wait for the lock then."""
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.refuse: Callable[[str], bool] = lambda uid: False
        self.computation: dict[str, Any] = {}
        """What `Get` says of every experience."""
        self.waiting_for = ""
        """What `GetStats` says that the trainer waits for."""
        self.break_push_after: deque[int] = deque()
        """Per push stream: requests stored before it breaks without answering the last one."""
        self.push_errors: deque[ExperienceBufferError] = deque()
        """Answers to the next requests on a push stream, in place of storing them."""
        self.batches: deque[list[bytes]] = deque()
        """What sample streams deliver, a frame per experience; `deliver` adds to it."""
        self.break_sample_after: deque[int] = deque()
        """Per sample stream: batches sent before it breaks."""
        self.break_when_taken = False
        """It breaks once the reader has taken what came, which may be dropped otherwise."""
        self.credits: list[int] = []
        self.byte_credits: list[int] = []
        self.notes: deque[str] = deque()
        """What sample streams say first that they wait for."""
        self.acks: list[tuple[int, int | None, int | None]] = []
        """Lease, step and rank of each ack, unary or on a stream."""
        self.num_waiting_ranks = 0
        self.nacked: list[int] = []
        self.lost_leases: set[int] = set()
        self.next_lease = 1
        self.changed = threading.Condition()
        """Wakes the streams."""
        self.open_streams = threading.Semaphore(0)
        self.ended_streams = threading.Semaphore(0)
        self.versions: deque[int | None] = deque()
        """What the watches of the policy version say next."""
        self.break_watch_after: deque[int] = deque()
        """Per watch: versions said before it breaks."""

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

    # --- pushes and contents

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
            outcome = response.outcomes.add(index=index, uid=item_of(payload).uid)
            if self.refuse(outcome.uid):
                outcome.status = types_pb2.PUSH_STATUS_REFUSED
                outcome.reason = types_pb2.REFUSAL_REASON_LATE
                outcome.message = "its group closed"
            elif outcome.uid in self.stored:
                outcome.status = types_pb2.PUSH_STATUS_DUPLICATE
            else:
                self.stored[outcome.uid] = payload
                outcome.status = types_pb2.PUSH_STATUS_STORED
        for tombstone in request.tombstones:
            outcome = response.outcomes.add(index=len(response.outcomes))
            outcome.status = types_pb2.PUSH_STATUS_STORED
            outcome.uid = f"{tombstone.id.batch}/{tombstone.id.task}"
        return response

    Push = answered(_store)

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

    @answered
    def List(self, request: pb.ListRequest) -> pb.ListResponse:
        start = int(request.page_token or 0)
        end = start + request.page_size
        uids = sorted(self.stored)
        ready = types_pb2.EXPERIENCE_STATE_READY
        return pb.ListResponse(
            experiences=[
                types_pb2.ExperienceSummary(uid=uid, state=ready) for uid in uids[start:end]
            ],
            next_page_token=str(end) if end < len(uids) else "",
        )

    @answered
    def Annotate(self, request: pb.AnnotateRequest) -> pb.AnnotateResponse:
        response = pb.AnnotateResponse()
        for annotation in request.annotations:
            outcome = response.outcomes.add(uid=annotation.uid)
            if self.refuse(annotation.uid):
                outcome.refusal = types_pb2.ANNOTATE_REFUSAL_DELIVERED
                outcome.message = "lease 17 of 'trainer' holds it"
        return response

    @answered
    def Get(self, request: pb.GetRequest) -> pb.GetResponse:
        response = pb.GetResponse(payload=self.stored[request.uid])
        response.summary.uid = request.uid
        response.summary.state = types_pb2.EXPERIENCE_STATE_WAITING_FOR_FIELDS
        if self.computation:
            response.computation.update(self.computation)
        return response

    @answered
    def Delete(self, request: pb.DeleteRequest) -> pb.DeleteResponse:
        return pb.DeleteResponse(num_deleted=2, unknown_uids=["x"])

    # --- buffers

    @answered
    def CreateBuffer(self, request: pb.CreateBufferRequest) -> pb.CreateBufferResponse:
        return pb.CreateBufferResponse(buffer=config_pb2.Buffer(config=request.config))

    @answered
    def UpdateBuffer(self, request: pb.UpdateBufferRequest) -> pb.UpdateBufferResponse:
        return pb.UpdateBufferResponse(buffer=config_pb2.Buffer(config=request.config))

    @answered
    def GetStats(self, request: pb.GetStatsRequest) -> pb.GetStatsResponse:
        buffer = pb.BufferStats(name="math")
        buffer.consumers.add(name="trainer", waiting_for=self.waiting_for)
        return pb.GetStatsResponse(server_version="9.8.7", buffers=[buffer])

    @answered
    def Snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        return pb.SnapshotResponse(name=f"snapshot-{request.label}", removed=["snapshot-old"])

    @answered
    def ReserveGroups(self, request: pb.ReserveGroupsRequest) -> pb.ReserveGroupsResponse:
        return pb.ReserveGroupsResponse(
            granted=request.groups[:2], reason="2 of 2 places are taken", retry_delay_seconds=1.5
        )

    def WatchPolicyVersion(
        self, request: pb.WatchPolicyVersionRequest, context: Any
    ) -> Iterator[pb.WatchPolicyVersionResponse]:
        self._begin(request, context)
        over = threading.Event()

        def end() -> None:
            over.set()
            with self.changed:
                self.changed.notify_all()
            self.ended_streams.release()

        if not context.add_callback(end):
            end()
        self.open_streams.release()
        left = self.break_watch_after.popleft() if self.break_watch_after else -1
        while True:
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
            with self.changed:
                self.changed.wait_for(lambda: over.is_set() or self.versions)
                if over.is_set():
                    return
                version = self.versions.popleft()
            yield pb.WatchPolicyVersionResponse(version=version)
            left -= 1

    # --- delivery

    def deliver(self, *batches: list[bytes]) -> None:
        """Let sample streams deliver these next."""
        with self.changed:
            self.batches += batches
            self.changed.notify_all()

    def reconnected(self) -> bool:
        """Wait until a stream broke and another is open."""
        semaphores = (self.ended_streams, self.open_streams, self.open_streams)
        return all(each.acquire(timeout=10) for each in semaphores)

    @property
    def acked(self) -> list[int]:
        """The leases of `acks`."""
        return [lease_id for lease_id, _, _ in self.acks]

    @answered
    def Sample(self, request: pb.SampleRequest) -> pb.SampleResponse:
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
        self.acks.append((lease_id, step, None))
        return pb.SampleStreamResponse(lease_result=pb.LeaseResult(lease_id=lease_id))

    @answered
    def Ack(self, request: pb.AckRequest) -> pb.AckResponse:
        if request.lease_id in self.lost_leases:
            raise LeaseNotFoundError("it was given back", subject=str(request.lease_id))
        step = request.step if request.HasField("step") else None
        rank = request.rank if request.HasField("rank") else None
        self.acks.append((request.lease_id, step, rank))
        return pb.AckResponse(num_experiences=3, num_waiting_ranks=self.num_waiting_ranks)

    @answered
    def Nack(self, request: pb.NackRequest) -> pb.NackResponse:
        self.nacked.append(request.lease_id)
        return pb.NackResponse(num_experiences=5)

    @answered
    def ExtendLease(self, request: pb.ExtendLeaseRequest) -> pb.ExtendLeaseResponse:
        seconds = request.lease_seconds or 7001.0
        return pb.ExtendLeaseResponse(lease=types_pb2.Lease(expires_in_seconds=seconds))

    @answered
    def Rewind(self, request: pb.RewindRequest) -> pb.RewindResponse:
        return pb.RewindResponse(num_experiences=101, num_leases=103)

    @answered
    def DeclareSafe(self, request: pb.DeclareSafeRequest) -> pb.DeclareSafeResponse:
        return pb.DeclareSafeResponse(num_experiences=107, safe_step=max(request.step, 109))

    @answered
    def ReleaseQuarantined(
        self, request: pb.ReleaseQuarantinedRequest
    ) -> pb.ReleaseQuarantinedResponse:
        return pb.ReleaseQuarantinedResponse(num_units=113)

    @answered
    def UpdatePriorities(self, request: pb.UpdatePrioritiesRequest) -> pb.UpdatePrioritiesResponse:
        unknown = [update.uid for update in request.updates if update.uid.startswith("unknown")]
        outdated = [update.uid for update in request.updates if update.uid.startswith("outdated")]
        return pb.UpdatePrioritiesResponse(
            num_updated=len(request.updates) - len(unknown) - len(outdated),
            unknown_uids=unknown,
            outdated_uids=outdated,
        )

    def _unused(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not scripted")

    SealGroup = DropGroup = GetBuffer = ListBuffers = _unused
    DeleteBuffer = PublishPolicyVersion = _unused
    ListGroups = GetGroup = ListLeases = ListSteps = ListDepartures = GetTrends = Scan = _unused

    def _lease(self, consumer: str, world_size: int = 0) -> types_pb2.Lease:
        self.next_lease += 1
        return types_pb2.Lease(
            id=self.next_lease - 1,
            consumer=consumer,
            expires_in_seconds=300,
            world_size=world_size,
        )

    def _experience(self, payload: bytes) -> types_pb2.SampledExperience:
        eid = item_of(payload).eid
        return types_pb2.SampledExperience(
            uid=eid.uid,
            group=eid.tid,
            payload=payload,
            num_deliveries=1,
            staleness=2,
            flags=["singleton", "bootstrapped"] if eid.run == 1 else [],
            probability=0.25,
            times_sampled=11,
            generation=13 + eid.run,
        )

    def _pack(self, payloads: list[bytes]) -> bytes:
        rows = [
            packed.PackedRow(uid=item_of(each).uid, payload=each, tensors={}) for each in payloads
        ]
        return b"".join(packed.pack(rows))
