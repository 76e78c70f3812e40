"""Scan: stored experiences with their payloads, one after the other, beside everything else.

It takes its turns on the event loop among pushes, a millisecond or so at a time, and holds the bytes of
one frame until the reader has taken it. It consumes nothing and keeps nothing from leaving.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from experience_buffer import errors
from experience_buffer._tables import json_text
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.rpc import inspection, messages
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.runtime.callers import caller_of, current_caller
from experience_buffer_server.runtime.response_bytes import Hold
from experience_buffer_server.store.deliveries import Delivered
from experience_buffer_server.store.interface import AdvantageRow, DamagedRecordError, Found

FRAME_BYTES: Final = 1 << 20
_MOST_IN_FRAME: Final = 4096
"""Experiences of a frame without payloads."""
_SLICE_BYTES: Final = 256 << 10
_SLICE: Final = 48
"""Experiences that are read in one turn on the event loop."""
_LOOKS: Final = 1024
"""Experiences that are looked at in one turn, whether the filter lets them pass or not."""
_FRAME_SECONDS: Final = 1.0
"""After which a frame goes out with what there is, so that the reader can go on after it."""
_MOST_SCANS: Final = 4
_RETRY_SECONDS: Final = 1.0


class Scans:
    """Counts the scans of a server. Belongs to its event loop."""

    def __init__(self) -> None:
        self._num_running = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run one more.

        Raises:
            ResourceExhaustedError: As many as may are running.
        """
        if self._num_running >= _MOST_SCANS:
            raise errors.ResourceExhaustedError(
                f"{self._num_running} scans are running, which is the most; come again when one has ended",
                subject="Scan",
                retry_delay_seconds=_RETRY_SECONDS,
            )
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1


async def frames(
    backend: Backend, scanning: Scanning
) -> AsyncGenerator[service_pb2.ScanResponse, None]:
    """The frames of a scan.

    Raises:
        BufferNotFoundError: The buffer was deleted.
        UnavailableError: The server is stopping.
    """
    hold: Hold | None = None
    try:
        while not scanning.is_over:
            # As much as a frame has, or what a single large experience takes.
            hold = await backend.responses.wait(caller_of(), scanning.next_bytes())
            yield await scanning.frame()
            hold.release()
    finally:
        if hold is not None:
            hold.release()


class Scanning:
    """One scan under way."""

    def __init__(self, backend: Backend, buffer: Buffer, request: service_pb2.ScanRequest) -> None:
        self._backend = backend
        self._buffer = buffer
        self._row = row = buffer.row
        self._wanted = inspection.wanted_of(request.filter)
        self._with_payloads = not request.without_payloads
        self._line = f"scan {current_caller().peer}"
        self._first = self._after = self._looked = row.seq_of(request.cursor)
        """Seqs: where it began, what was sent, what was looked at."""
        self._last = buffer.last_seq
        """What comes later isn't among it."""
        self._ready: list[Entry] = []
        """Looked at, and yet to be read; in order."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to send."""
        return self._after >= self._last

    def next_bytes(self) -> int:
        """About as much as the next frame takes."""
        first = self._ready[0].record.payload_bytes if self._ready else 0
        return max(FRAME_BYTES, first) if self._with_payloads else FRAME_BYTES

    async def frame(self) -> service_pb2.ScanResponse:
        """The next frame: empty where nothing of what was looked at passes the filter."""
        frame, num_bytes, began = service_pb2.ScanResponse(), 0, time.monotonic()
        while not self.is_over:
            self._check()
            if not self._ready:
                await self._look()
                if self._ready:
                    continue
                if self.is_over or time.monotonic() - began > _FRAME_SECONDS:
                    break
                continue
            room = FRAME_BYTES - num_bytes
            if frame.experiences and (
                room <= 0 or self._size(self._ready[0]) > max(room, _SLICE_BYTES)
            ):
                break
            num_bytes += await self._read(frame)
            if len(frame.experiences) >= _MOST_IN_FRAME:
                break
        frame.cursor = self._row.cursor(self._after)
        span = max(self._last - self._first, 1)
        frame.progress = min((self._after - self._first) / span, 1.0)
        return frame

    def _check(self) -> None:
        if self._backend.draining.is_set():
            raise errors.UnavailableError(
                "the server is stopping; go on by the cursor when it is back",
                retry_delay_seconds=1.0,
            )
        if self._buffer.closed:
            raise errors.BufferNotFoundError(
                f"buffer {self._buffer.name!r} was deleted", subject=self._buffer.name
            )

    def _size(self, entry: Entry) -> int:
        return entry.record.payload_bytes if self._with_payloads else 0

    async def _look(self) -> None:
        """Find what comes next."""
        turn = await self._backend.turns.take(self._line)
        try:
            self._check()
            looked = list(itertools.islice(self._buffer.since(self._looked), _LOOKS))
            seen = [entry for entry in looked if entry.record.seq <= self._last]
            self._ready = list(await present.matching(self._buffer, self._wanted, seen))
            is_end = len(looked) < _LOOKS or len(seen) < len(looked)
            self._looked = self._last if is_end else looked[-1].record.seq
            if not self._ready:
                self._after = self._looked
        finally:
            turn.end()

    async def _read(self, frame: service_pb2.ScanResponse) -> int:
        """Read a slice into a frame; its bytes."""
        num_bytes, num_read = await self._read_slice(frame, self._ready)
        last = self._ready[num_read - 1].record.seq
        del self._ready[:num_read]
        self._after = last if self._ready else self._looked
        return num_bytes

    async def _read_slice(
        self,
        frame: service_pb2.ScanResponse,
        found: Sequence[Entry],
        marks: Sequence[Delivered | None] = (),
    ) -> tuple[int, int]:
        """Read some of what comes next into a frame; bytes, and how many were read."""
        entries, num_bytes = [found[0]], self._size(found[0])
        for entry in found[1:_SLICE]:
            num_bytes += self._size(entry)
            if num_bytes > _SLICE_BYTES:
                break
            entries.append(entry)
        store, buffer = self._backend.store, self._buffer
        async with fetched(store, buffer.id, entries if self._with_payloads else ()):
            turn = await self._backend.turns.take(self._line)
            try:
                self._check()
                known = marks or [None] * len(entries)
                num_bytes = self._add(frame, [*zip(entries, known, strict=False)])
            finally:
                turn.end()
        return num_bytes, len(entries)

    def _add(
        self,
        frame: service_pb2.ScanResponse,
        entries: Sequence[tuple[Entry, Delivered | None]],
    ) -> int:
        buffer = self._buffer
        # Others were on the event loop since.
        left = [pair for pair in entries if pair[0].durable and not pair[0].leaving]
        there = {entry.record.seq for entry in buffer.entries(e.record.seq for e, _ in left)}
        here = [pair for pair in left if pair[0].record.seq in there]
        read = [entry for entry, _ in here if not entry.record.tombstone]
        uids, seqs = [e.record.uid for e in read], [e.record.seq for e in read]
        reasons: dict[int, str] = {}
        num_bytes = 0
        with self._backend.store.stored(buffer.id, uids if self._with_payloads else [], seqs) as (
            payloads,
            computed,
        ):
            found: Mapping[int, Any] = dict(zip(seqs, payloads, strict=self._with_payloads))
            rows: Mapping[int, Found[AdvantageRow]] = dict(zip(seqs, computed, strict=True))
            for entry, mark in here:
                seq = entry.record.seq
                payload, row = found.get(seq), rows.get(seq)
                is_due = self._with_payloads and not entry.record.tombstone
                message = frame.experiences.add(
                    times_sampled=buffer.times_sampled(entry),
                    cursor=self._row.cursor(seq) if mark is None else "",
                )
                if mark is not None:
                    message.lease_id, message.unit, message.rank = (
                        mark.lease_id, mark.unit, mark.rank,
                    )  # fmt: skip
                self._summarise(message.summary, entry)
                reason = _damage(payload, row, is_due=is_due, is_computed=bool(entry.magnitude))
                if reason:
                    message.damage = reasons[seq] = reason
                    continue
                if payload is not None:
                    message.payload = bytes(payload)
                if isinstance(row, AdvantageRow):
                    self._add_computed(message, row)
                num_bytes += len(message.payload) + len(message.advantages) + 300
        buffer.set_aside(reasons)
        return num_bytes

    def _summarise(self, summary: types_pb2.ExperienceSummary, entry: Entry) -> None:
        """What `List` says, but for the places: there are hundreds in each frame."""
        buffer, record = self._buffer, entry.record
        summary.uid, summary.tid = record.uid, record.tid
        summary.rid, summary.sid = record.rid, record.sid
        summary.state = messages.state_number(buffer.state_of(entry))
        if record.reward is not None:
            summary.reward = record.reward
        summary.response_tokens, summary.payload_bytes = (
            record.response_tokens, record.payload_bytes,
        )  # fmt: skip
        if record.min_version is not None:
            summary.min_policy_version = record.min_version
        if record.max_version is not None:
            summary.max_policy_version = record.max_version
        summary.push_time = record.push_time
        summary.message = buffer.kept_from(entry)
        summary.priority, summary.generation = record.priority, record.generation
        if entry.group is not None:
            summary.group = entry.group.row.key
        if (staleness := buffer.staleness(entry)) is not None:
            summary.staleness = staleness
        if (magnitude := buffer.magnitude(entry)) is not None:
            summary.magnitude = magnitude
        if entry.truncated is not None:
            summary.truncated = entry.truncated

    def _add_computed(self, message: service_pb2.ScannedExperience, row: AdvantageRow) -> None:
        message.details = json_text.encoded(row.details, metadata_bytes=0) or ""
        message.flags.extend(row.flags)
        if self._with_payloads:
            message.advantages = row.advantages
            if row.returns != row.advantages:
                message.returns = row.returns


def _damage(
    payload: Found[memoryview], row: Found[AdvantageRow], *, is_due: bool, is_computed: bool
) -> str:
    """Why an experience can't be read back; empty where it can."""
    if isinstance(payload, DamagedRecordError) or (is_due and payload is None):
        return str(payload or "its payload is gone")
    if isinstance(row, DamagedRecordError):
        return str(row)
    if row is None and is_computed:
        return "its advantages are gone"
    return ""
