"""The way of a push: decode, admit, recognise repeats, join groups, commit, answer.

What was read before may be handed over (see `gateway`: in slices, one push at a time); all else up
to the commit happens in one go on the event loop, so that pushes can't overtake each other. What
follows the commit happens even when the call that pushed has been cancelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from experience_buffer import errors
from experience_buffer_server.buffer.intake.admission import PayloadReader
from experience_buffer_server.buffer.intake.notices import Notices
from experience_buffer_server.buffer.intake.placement import completing, forecast
from experience_buffer_server.buffer.intake.push_reading import (
    Admitted,
    Arrived,
    Outcome,
    Push,
    PushStatus,
    Reading,
)
from experience_buffer_server.buffer.intake.push_room import (
    Patience,
    Place,
    PushRoom,
    Shortage,
    refuse_full,
)
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Candidate, Entry, Group, Refusal
from experience_buffer_server.buffer.state.group_table import groups_of, put_row
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.callers import address_of, current_caller
from experience_buffer_server.runtime.quotas import Charge
from experience_buffer_server.store.interface import Record, WriteBatch, cut_of

_STORED = PushStatus.STORED


class Ingest:
    """The push path of one buffer. Not thread-safe; belongs to its event loop."""

    def __init__(self, state: BufferState, room: PushRoom, payloads: PayloadReader) -> None:
        self._state = state
        self._room = room
        self.reading = Reading(state, payloads)
        """Reads pushes."""
        self._notices = Notices()

    async def push(
        self,
        push: Push,
        patience: Patience | None,
        charge: Charge,
        admitted: Admitted | None,
    ) -> list[Outcome]:
        """Store what can be stored; one outcome per experience, then one per tombstone.

        Args:
            push: The request.
            patience: For how long it may wait for room where the settings say so; None: not at all.
            charge: What it holds, and may hold.
            admitted: What `reading` made of it just now; None: it is read here.

        Raises:
            TrxpError: A payload as a whole can't be read; nothing is stored.
            InvalidRequestError: More items than a push may hold; nothing is stored.
            BufferFullError: No room; nothing of this push is stored but what completes groups that
                have room already (`placement.completing`).
            ResourceExhaustedError: A limiter or the pacing holds it back, or too much is under way;
                the same.
            UnavailableError: The server stops while it waits; the same.
            BufferNotFoundError: The buffer was deleted while it waited.
        """
        self._state.metrics.pushed_bytes(self._state.name, push.num_bytes)
        arrived = self._read(push, charge, admitted)
        # Each experience alone can take many times its part of the request.
        del admitted
        batch = self._state.changes.batch()
        place: Place | None = None
        ahead: set[int] = set()
        try:
            while shortage := self._check(
                arrived, place, ahead, push.group_size, may_wait=patience is not None
            ):
                assert patience is not None
                charge.waits()
                place = place or self._room.join(shortage, [new.uid for _, new in arrived.fresh])
                del arrived
                await self._room.wait(place, shortage, patience)
                arrived = self._read(push, charge)
            entries = self._enter(batch, arrived, push.group_size)
            self._note_who(entries)
        finally:
            if place is not None:
                self._room.leave(place)
                charge.has_waited()
        if slips := [one for _, one in arrived.fresh if one.trains_all or one.eid.task == ""]:
            self._notices.look(
                slips, buffer=self._state.name, group_by=self._state.settings.group_by
            )
        if self._room.num_waiting:
            self._room.stored([entry.record.uid for entry in entries])
        await self._make_durable(batch, entries, arrived.outcomes)
        outcomes = [outcome for outcome in arrived.outcomes if outcome is not None]
        for index in ahead:
            # A duplicate of what this push itself has stored while the rest waited.
            outcomes[index] = outcomes[index]._replace(status=_STORED)
        self._keep_refused(push, outcomes)
        return self._count(outcomes)

    def _keep_refused(self, push: Push, outcomes: Sequence[Outcome]) -> None:
        """Hand some of what is refused to the archive, where it keeps that."""
        archive = self._state.settings.archive
        if archive is None or not archive.refused:
            return
        num_experiences, payloads = len(outcomes) - len(push.tombstones), push.payloads
        refused = [
            (index, outcome)
            for index, outcome in enumerate(outcomes[:num_experiences])
            if outcome.status is PushStatus.REFUSED
        ]
        for index, outcome in refused:
            payload: bytes | memoryview = b""
            if len(payloads) == num_experiences:
                payload, index = payloads[index], 0
            elif len(payloads) == 1:
                (payload,) = payloads
            self._state.outbox.refuse(
                outcome.uid, outcome.reason or "", outcome.message, payload, index
            )

    def _check(
        self,
        arrived: Arrived,
        place: Place | None,
        ahead: set[int],
        group_size: int,
        *,
        may_wait: bool,
    ) -> Shortage | None:
        """See whether a push may go in; what of it completes groups doesn't wait for the rest."""
        try:
            shortage = self._room.check(arrived.forecast, place, may_wait=may_wait)
        except errors.ResourceExhaustedError as error:
            if not (gone := self._go_ahead(arrived, group_size)):
                raise
            raise type(error)(
                f"{error}; {len(gone)} of it complete groups and are stored, push the rest again",
                subject=error.subject,
                retry_delay_seconds=error.retry_delay_seconds,
            ) from None
        if shortage is not None:
            ahead |= self._go_ahead(arrived, group_size)
        return shortage

    def _go_ahead(self, arrived: Arrived, group_size: int) -> set[int]:
        """Store what of a push completes groups, where that is a part of it; its indices."""
        part = completing(self._state, arrived.forecast)
        if not part:
            return set()
        placed = forecast(self._state, part, group_size)
        try:
            if self._room.check(placed, None, may_wait=False) is not None:
                return set()
        except errors.ResourceExhaustedError:
            return set()  # A limiter counts each experience.
        batch = self._state.changes.batch()
        entries = self._enter(batch, Arrived(arrived.outcomes, {}, placed), group_size)
        self._note_who(entries)
        self._room.stored([entry.record.uid for entry in entries])
        self._state.changes.log(
            self._state.changes.submit(
                batch, partial(self._stored, entries), partial(self._refused, entries)
            )
        )
        return {index for index, _ in part}

    def _read(self, push: Push, charge: Charge, admitted: Admitted | None = None) -> Arrived:
        """Read a push as it is now: what is stored, and the settings, change while it waits."""
        arrived = self.reading.read(push, admitted)
        charge.takes(sum(len(candidate.payload) for _, candidate in arrived.fresh))
        return arrived

    def _enter(self, batch: WriteBatch, arrived: Arrived, group_size: int) -> list[Entry]:
        """Take in what is new: its entries, with the rows in the batch and the outcomes filled in.

        Everything happens at once, for a whole push, before anything is committed.
        """
        state, contents, now = self._state, self._state.contents, clock.now()
        needs, outcomes = state.settings.advantage.needs, arrived.outcomes
        entries: list[Entry] = []
        changed: dict[int, Group] = {}
        state.outbox.free(batch, (candidate.uid for _, candidate in arrived.fresh))
        group, group_of = None, None
        for (index, candidate), key in zip(arrived.fresh, arrived.forecast.keys, strict=True):
            record = record_of(candidate, now)
            if key is not None:
                # The same as for the one before, as long as that group takes more.
                if group is None or key != group_of or group.row.closed:
                    joined = contents.groups.join(
                        key,
                        group_size,
                        settings=state.settings,
                        now=now,
                        remembered=arrived.forecast.closed_before.get(key, ""),
                    )
                    if isinstance(joined, Refusal):
                        group = None
                        outcomes[index] = Outcome(
                            record.uid, PushStatus.REFUSED, joined.reason, joined.message
                        )
                        continue
                    group, group_of = joined, key
                record.group_id = group.row.id
            record.seq = contents.next_seq()
            entry = Entry(record, group)
            batch.append(state.id, record, candidate.payload)
            contents.add(entry)
            if needs is not None and not record.tombstone:
                contents.set_missing(entry, needs.missing(record.fields))
            if group is not None:
                closed = contents.groups.add_member(group, entry)
                if closed or group.row.id not in changed:
                    changed[group.row.id] = group
                if closed:
                    self._state.metrics.group_closed(state.name, "whole")
            entries.append(entry)
            outcomes[index] = Outcome(record.uid, _STORED)
        if entries:
            self.reading.begin(entries, arrived.fresh)
        for group in changed.values():
            batch.put_group(state.id, group.row)
        for index, first in arrived.repeats.items():
            if (origin := outcomes[first]) is not None and origin.status is PushStatus.REFUSED:
                outcomes[index] = origin
        return entries

    def _note_who(self, entries: Sequence[Entry]) -> None:
        """Remember who pushed; if they can't be stored, nobody asks for it."""
        if entries:
            caller = current_caller()
            who = caller.name if caller.name != address_of(caller.peer) else caller.address
            first, last = entries[0].record.seq, entries[-1].record.seq
            self._state.telemetry.pushes.pushed(first, last, who)

    async def _make_durable(
        self, batch: WriteBatch, entries: list[Entry], outcomes: Sequence[Outcome | None]
    ) -> None:
        """Commit; also wait for repeats whose first push is still being committed."""
        pending = [
            entry
            for outcome in outcomes
            if outcome is not None and outcome.status is PushStatus.DUPLICATE
            if (entry := self._state.contents.by_uid(outcome.uid)) is not None and not entry.durable
        ]
        if not entries and not pending:
            return
        # Submitted here and now: what is submitted later must come later in the store, too.
        await self._state.changes.submit(
            batch, partial(self._stored, entries), partial(self._refused, entries)
        )
        if any(not entry.durable for entry in pending):
            raise errors.BufferFullError(
                f"buffer {self._state.name!r}: the first push of a repeated experience could not "
                "be stored; push again",
                retry_delay_seconds=1.0,
            )

    def _stored(self, entries: list[Entry]) -> None:
        # Here, where it happens: the call that pushed may have been given up.
        self.reading.end(entries)
        self._state.outbox.freed(entry.record.uid for entry in entries)
        if entries:
            self._state.metrics.pushed(self._state.name, _STORED, "", len(entries))
            self._state.telemetry.trends.pushed(entries)
        self._state.events.stored(entries)

    def _refused(self, entries: list[Entry], error: BaseException) -> None:
        """The commit failed: forget its entries; what later pushes stored of their groups is wrong."""
        batch = self._state.changes.batch()
        self.reading.end(entries)
        for entry in entries:
            entry.leaving = True
            self._state.contents.remove(entry)
            if entry.group is not None:
                self._state.contents.groups.withdraw(entry.group, entry)
        groups, now = groups_of(entries), clock.now()
        for group in groups:
            put_row(batch, self._state.id, group, now)
        if groups:
            self._state.changes.spawn(batch)
        for group in groups:
            self._state.events.check_whole(group)
        refuse_full(self._state, error)

    def _count(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Count what wasn't stored now."""
        others = [outcome for outcome in outcomes if outcome.status is not _STORED]
        if others:
            kinds = Counter((outcome.status, outcome.reason or "") for outcome in others)
            for (status, reason), count in kinds.items():
                self._state.metrics.pushed(self._state.name, status, reason, count)
        return outcomes


def record_of(candidate: Candidate, now: float) -> Record:
    """Its row, but for its number and its group."""
    eid = candidate.eid
    # Not by its constructor: with so many keywords it takes three times as long.
    record = Record.__new__(Record)
    record.seq = record.group_id = record.version = 0
    record.uid = candidate.uid
    record.cut = cut_of(str(eid.batch), str(eid.task))
    record.digest_number = int.from_bytes(candidate.digest, "big")
    record.tombstone = candidate.tombstone
    record.reward = candidate.reward
    record.response_tokens = candidate.response_tokens
    record.payload_bytes = len(candidate.payload)
    record.min_version = candidate.min_version
    record.max_version = candidate.max_version
    record.push_time = now
    record.note = candidate.note
    record.fields = candidate.fields
    record.priority = candidate.priority
    return record
