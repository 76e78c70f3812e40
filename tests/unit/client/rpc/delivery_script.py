"""The part of the scripted server that answers calls about delivery: it keeps what was asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc

from experience_buffer.v1 import service_pb2 as pb


class DeliveryScript:
    """Answers with distinct primes; its `_begin` raises the scripted failures."""

    def __init__(self) -> None:
        self.acks: list[tuple[int, int | None, int | None]] = []
        """Lease, step and rank of each ack, unary or on a stream."""
        self.num_waiting_ranks = 0
        self.versions: deque[int | None] = deque()
        """What the watches of the policy version say next."""
        self.break_watch_after: deque[int] = deque()
        """Per watch: versions said before it breaks."""
        self.watched = threading.Condition()
        """Wakes the watches: notify it after adding to `versions`."""
        self.open_watches = threading.Semaphore(0)
        self.ended_watches = threading.Semaphore(0)

    def _begin(self, request: Any, context: Any) -> None:
        raise NotImplementedError

    def ExtendLease(self, request: pb.ExtendLeaseRequest, context: Any) -> pb.ExtendLeaseResponse:
        self._begin(request, context)
        response = pb.ExtendLeaseResponse()
        response.lease.id = request.lease_id
        response.lease.expires_in_seconds = request.lease_seconds or 7001.0
        return response

    def Rewind(self, request: pb.RewindRequest, context: Any) -> pb.RewindResponse:
        self._begin(request, context)
        return pb.RewindResponse(num_experiences=101, num_leases=103)

    def DeclareSafe(self, request: pb.DeclareSafeRequest, context: Any) -> pb.DeclareSafeResponse:
        self._begin(request, context)
        return pb.DeclareSafeResponse(num_experiences=107, safe_step=max(request.step, 109))

    def ReleaseQuarantined(
        self, request: pb.ReleaseQuarantinedRequest, context: Any
    ) -> pb.ReleaseQuarantinedResponse:
        self._begin(request, context)
        return pb.ReleaseQuarantinedResponse(num_units=113)

    def UpdatePriorities(
        self, request: pb.UpdatePrioritiesRequest, context: Any
    ) -> pb.UpdatePrioritiesResponse:
        self._begin(request, context)
        unknown = [update.uid for update in request.updates if update.uid.startswith("unknown")]
        outdated = [update.uid for update in request.updates if update.uid.startswith("outdated")]
        return pb.UpdatePrioritiesResponse(
            num_updated=len(request.updates) - len(unknown) - len(outdated),
            unknown_uids=unknown,
            outdated_uids=outdated,
        )

    def ReserveGroups(
        self, request: pb.ReserveGroupsRequest, context: Any
    ) -> pb.ReserveGroupsResponse:
        self._begin(request, context)
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
            with self.watched:
                self.watched.notify_all()
            self.ended_watches.release()

        if not context.add_callback(end):
            end()
        self.open_watches.release()
        left = self.break_watch_after.popleft() if self.break_watch_after else -1
        while True:
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
            with self.watched:
                self.watched.wait_for(lambda: over.is_set() or self.versions)
                if over.is_set():
                    return
                version = self.versions.popleft()
            yield pb.WatchPolicyVersionResponse(version=version)
            left -= 1
