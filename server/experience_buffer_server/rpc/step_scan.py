"""Scan of a training step: what it consumed, in the order of its delivery, stored still or archived."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from experience_buffer import errors
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.rpc import archived
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.scanning import FRAME_BYTES, Scanning
from experience_buffer_server.store.deliveries import Delivered

_PAGE: Final = 1000


class _Archived(NamedTuple):
    """One that has left, and is archived."""

    uid: str
    num_bytes: int
    times: int
    """How often the consumer has acknowledged it with the step."""


class StepScanning(Scanning):
    """One scan of a training step under way."""

    def __init__(self, backend: Backend, buffer: Buffer, request: service_pb2.ScanRequest) -> None:
        super().__init__(backend, buffer, request)
        self._consumer, self._step = request.filter.consumer, request.filter.step
        self._left: deque[tuple[Entry | _Archived, Delivered]] = deque()
        self._num_all = 0
        where = service_pb2.Filter(consumer=self._consumer, step=self._step)
        is_said = self._consumer and request.filter.HasField("step")
        if not is_said or where != request.filter or request.cursor:
            raise errors.InvalidRequestError(
                "delivered goes with a consumer and a step, and with no other filter, nor a cursor",
                subject="delivered",
            )

    async def find(self) -> None:
        """Find what the step has consumed.

        Raises:
            ConsumerNotFoundError: There is no such consumer.
            ResourceExhaustedError: Too many look into the archive.
            UnavailableError: It can't be read.
        """
        gone = await self._find_archived()
        leases = await self._backend.store.remembered_leases(self._buffer.id)
        counts = {seq: found.times for seq, found in gone.items()}
        entries, order = self._buffer.delivered_at(self._consumer, self._step, leases, counts)
        for each in order:
            found = entries.get(each.seq) or gone.get(each.seq)
            if found is not None:
                self._left.append((found, each))
        self._num_all = len(self._left)

    async def _find_archived(self) -> dict[int, _Archived]:
        archivist, found = self._backend.registry.archivist, dict[int, _Archived]()
        if not archived.has(archivist, self._buffer):
            return found
        wanted = {"consumer": self._consumer, "step": self._step}
        before = None
        while True:
            self._check()
            answer = await archivist.read(
                {
                    "kind": "list",
                    "buffer": self._buffer.id,
                    "filter": wanted,
                    "size": _PAGE,
                    "before": before,
                }
            )
            for row in answer["rows"]:
                acks = Counter(zip(row["acked_by"] or (), row["acked_steps"] or (), strict=False))
                times = acks[self._consumer, self._step]
                found[row["seq"]] = _Archived(row["uid"], row["payload_bytes"] or 0, times)
            before = answer["before"]
            if before is None:
                return found

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to send."""
        return not self._left

    def next_bytes(self) -> int:
        """About as much as the next frame takes."""
        return max(FRAME_BYTES, *(_size(found) for found, _ in self._head(1)))

    async def frame(self) -> service_pb2.ScanResponse:
        """The next frame."""
        frame, num_bytes = service_pb2.ScanResponse(), 0
        while self._left and num_bytes < FRAME_BYTES:
            self._check()
            found, mark = self._left[0]
            if frame.experiences and num_bytes + _size(found) > FRAME_BYTES:
                break
            if isinstance(found, _Archived):
                self._left.popleft()
                num_bytes += await self._add_archived(frame, found, mark)
            else:
                num_bytes += await self._add_stored(frame)
        frame.progress = 1 - len(self._left) / max(self._num_all, 1)
        return frame

    async def _add_stored(self, frame: service_pb2.ScanResponse) -> int:
        entries, marks = [], []
        for found, mark in self._head(len(self._left)):
            if isinstance(found, _Archived):
                break
            entries.append(found)
            marks.append(mark)
        num_bytes, num_read = await self._read_slice(frame, entries, marks)
        for _ in range(num_read):
            self._left.popleft()
        return num_bytes

    def _head(self, count: int) -> Iterator[tuple[Entry | _Archived, Delivered]]:
        for place in range(min(count, len(self._left), 64)):
            yield self._left[place]

    async def _add_archived(
        self, frame: service_pb2.ScanResponse, found: _Archived, mark: Delivered
    ) -> int:
        archivist = self._backend.registry.archivist
        row = await archived.row_of(archivist, self._buffer, found.uid)
        message = frame.experiences.add(lease_id=mark.lease_id, unit=mark.unit, rank=mark.rank)
        if row is None or row["seq"] != mark.seq:
            message.summary.uid = found.uid
            message.damage = "it is in the archive no more"
            return 0
        archived.fill_scanned(message, row)
        return len(message.payload) + len(message.advantages)


def _size(found: Entry | _Archived) -> int:
    return found.num_bytes if isinstance(found, _Archived) else found.record.payload_bytes
