"""Late fields: values, log-probabilities or rewards added to stored experiences.

What was computed for an experience, or for its group, no longer holds once it is annotated: it goes
with the same commit, and is computed again. Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experience_buffer import errors
from experience_buffer_server.buffer.delivery import damage
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.intake.annotation import (
    AnnotateOutcome,
    AnnotateReason,
    Annotation,
    admit_annotated,
)
from experience_buffer_server.buffer.intake.push_room import refuse_full
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import COUNTED, Entry
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import (
    MAX_KEY_BYTES,
    OTHER_DIGEST,
    Found,
    Record,
    WriteBatch,
)

_SHOWN_CHARS = 60
_ENVELOPE_BYTES = 64 * 1024
"""Room in a message for everything but the payload."""


@dataclass(slots=True)
class _Change:
    """An annotated experience on its way to the disk."""

    entry: Entry
    record: Record
    payload: bytes
    scope: list[Entry]
    """What was computed from it: its group, where groups are computed together, else itself."""
    words: str
    """What is added."""

    @property
    def is_first_reward(self) -> bool:
        """It had no reward before; until it is replaced."""
        return self.entry.record.reward is None


class Annotating:
    """Annotates the experiences of one buffer. Not thread-safe."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        # One request after the other: each reads payloads that the one before may have changed.
        self._turn = asyncio.Lock()

    async def annotate(self, annotations: Sequence[Annotation]) -> list[AnnotateOutcome]:
        """Add fields to stored experiences; one outcome each, after the commit.

        Large requests are stored part by part; one that is sent again goes on where it ended.

        Raises:
            InvalidRequestError: Too many annotations, or two for one uid; nothing is changed.
            BufferFullError: No room for all of them; what came before that is stored.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        self.check_count(len(annotations))
        if len({annotation.uid for annotation in annotations}) < len(annotations):
            raise errors.InvalidRequestError(
                "several annotations name one uid; merge them", subject="annotations"
            )
        outcomes: list[AnnotateOutcome] = []
        for part in self._parts(annotations):
            outcomes += await self._state.tasks.finish(self._annotate(part))
        return outcomes

    def _parts(self, annotations: Sequence[Annotation]) -> Iterator[list[Annotation]]:
        """So many at a time that reading and writing their payloads holds nobody up for long."""
        part: list[Annotation] = []
        num_bytes = 0
        for annotation in annotations:
            part.append(annotation)
            entry = self._state.contents.by_uid(annotation.uid)
            num_bytes += entry.record.payload_bytes if entry is not None else 0
            if num_bytes >= TUNING.annotated_at_once_bytes:
                yield part
                part, num_bytes = [], 0
        if part:
            yield part

    def check_count(self, num_annotations: int) -> None:
        """Refuse more annotations than a request may have.

        Raises:
            InvalidRequestError: More.
        """
        if num_annotations > self._state.limits.max_push_items:
            raise errors.InvalidRequestError(
                f"{num_annotations} annotations in one request, the limit "
                f"server.max_push_items is {self._state.limits.max_push_items}; split the request",
                subject="annotations",
            )

    async def _annotate(self, annotations: Sequence[Annotation]) -> list[AnnotateOutcome]:
        async with self._turn:
            self._state.check_open()
            named = [self._state.contents.by_uid(annotation.uid) for annotation in annotations]
            async with fetched(self._state.store, self._state.id, named):
                self._state.check_open()
                outcomes, changes = self._prepare(annotations)
            self._check_room(changes)
            if changes:
                await self._store_changes(changes)
            gone = {change.entry.record.uid for change in changes if not change.entry.is_staying}
            return [self._unknown(o.uid) if o.uid in gone else o for o in outcomes]

    def _unknown(self, uid: str) -> AnnotateOutcome:
        # It was sent, and is shown twice: the answer must not be too long for one message.
        message = f"buffer {self._state.name!r} holds no experience {uid[:_SHOWN_CHARS]!r}"
        return AnnotateOutcome(uid[:MAX_KEY_BYTES], AnnotateReason.UNKNOWN_UID, message)

    def _prepare(
        self, annotations: Sequence[Annotation]
    ) -> tuple[list[AnnotateOutcome], list[_Change]]:
        """Decide on each annotation; nothing is changed yet."""
        # Of those that there are: a uid that is asked for may be too long for any key.
        uids = [a.uid for a in annotations if self._state.contents.by_uid(a.uid) is not None]
        payloads = dict(zip(uids, self._state.store.payloads(self._state.id, uids), strict=True))
        outcomes: list[AnnotateOutcome] = []
        changes: list[_Change] = []
        for annotation in annotations:
            decided = self._decide(annotation, payloads.get(annotation.uid))
            if isinstance(decided, AnnotateOutcome):
                outcomes.append(decided)
            else:
                outcomes.append(AnnotateOutcome(annotation.uid))
                changes.append(decided)
        return outcomes, changes

    def _decide(self, annotation: Annotation, payload: Found[bytes]) -> AnnotateOutcome | _Change:
        uid = annotation.uid
        entry = self._state.contents.by_uid(uid)
        if entry is None or not (entry.durable and entry.is_staying):
            return self._unknown(uid)
        if entry.damage or not isinstance(payload, bytes):
            if payload is None and entry.record.tombstone:
                return self._unknown(uid)
            why = entry.damage or str(payload or "its payload is gone")
            message = f"its stored payload can't be read back ({why}); delete the experience"
            return AnnotateOutcome(uid, AnnotateReason.INVALID, message)
        try:
            admitted = admit_annotated(
                annotation,
                payload,
                settings=self._state.settings,
                max_payload_bytes=self._state.limits.max_message_bytes - _ENVELOPE_BYTES,
                limits=self._state.limits.payload_limits,
            )
        except errors.TrxpError as error:
            return AnnotateOutcome(uid, AnnotateReason.INVALID, str(error))
        if isinstance(admitted, str):
            return AnnotateOutcome(uid, AnnotateReason.INVALID, admitted)
        annotated = bytes(admitted.payload)
        if annotated == payload:
            # Said before, by a call whose answer was lost: there is nothing to do.
            return AnnotateOutcome(uid)
        group = entry.group if self._state.settings.needs_groups else None
        has_lost_members = group is not None and group.has_consumed
        scope = [entry] if group is None else [one for one in group.votes if one.is_staying]
        if has_lost_members or any(self._state.has_delivered(member) for member in scope):
            message = (
                "it, or a member of its group, is with a consumer that has its advantages, or was "
                "consumed; annotate earlier, through a consumer with raw = true"
            )
            return AnnotateOutcome(uid, AnnotateReason.DELIVERED, message)
        record = dataclasses.replace(
            entry.record,
            reward=admitted.reward,
            payload_bytes=len(annotated),
            min_version=admitted.min_version,
            max_version=admitted.max_version,
            fields=admitted.fields | OTHER_DIGEST | (COUNTED if entry.counted else 0),
        )
        return _Change(entry, record, annotated, scope, _words_of(annotation))

    def _check_room(self, changes: Sequence[_Change]) -> None:
        """Refuse the request as a whole when the buffer has no room for what it adds."""
        added = sum(c.record.payload_bytes - c.entry.record.payload_bytes for c in changes)
        limit, have = self._state.settings.max_bytes, self._state.contents.num_bytes
        if added > 0 and have + added > limit:
            raise errors.BufferFullError(
                f"buffer {self._state.name!r} is full: {have} + {added} bytes exceed max_bytes = "
                f"{limit}; acknowledge batches, or raise max_bytes",
                subject=self._state.name,
                retry_delay_seconds=1.0,
            )

    async def _store_changes(self, changes: Sequence[_Change]) -> None:
        scope = list({id(e): e for change in changes for e in change.scope}.values())
        were_available = [entry for entry in scope if entry.available]
        computed = [(entry.magnitude, entry.advantage) for entry in scope]
        batch = self._state.changes.batch()
        self._submit(batch, changes, scope)

        def failed(error: BaseException) -> None:
            for entry, before in zip(scope, computed, strict=True):
                entry.changing = False
                entry.magnitude, entry.advantage = before
            damage.put_notes(self._state, scope)
            self._state.events.make_available(
                [entry for entry in were_available if not entry.damage]
            )
            self._state.events.advance(scope)
            refuse_full(self._state, error)

        await self._state.changes.submit(batch, lambda: self._stored(changes, scope), failed)

    def _stored(self, changes: Sequence[_Change], scope: Sequence[Entry]) -> None:
        now = clock.now()
        late = [r for c in changes if (r := c.record.reward) is not None and c.is_first_reward]
        self._state.telemetry.trends.rewarded(late)
        for change in changes:
            # What was found damaged meanwhile stays set aside.
            record = dataclasses.replace(change.record, note=change.entry.record.note)
            self._state.contents.replace_record(change.entry, record)
            self._state.telemetry.note_annotated(record.seq, change.words, now)
        for entry in scope:
            entry.changing = False
            self._state.contents.set_missing(entry, self._state.missing_fields(entry))
        damage.put_notes(self._state, scope)
        self._state.events.revalue([change.entry for change in changes])
        self._state.events.advance(scope)

    def _submit(
        self, batch: WriteBatch, changes: Sequence[_Change], scope: Sequence[Entry]
    ) -> None:
        """Nobody gets the old advantages from here on; jobs under way are void."""
        for change in changes:
            batch.replace(self._state.id, change.record, change.payload)
        for entry in scope:
            batch.delete_advantages(self._state.id, entry.record.seq)
            entry.generation += 1
            entry.changing = True
            entry.available = False
            entry.advantage = None
            entry.magnitude = 0.0  # Before the disk: a read must not miss what is removed.
            self._state.contents.set_quarantine(entry, "")
            if entry.group is not None:
                entry.group.available = False
        self._state.withdraw(scope, keep_raw=True)


def _words_of(annotation: Annotation) -> str:
    """What an annotation adds, for whoever looks at it later."""
    reward = ["reward"] if annotation.reward is not None else []
    names = itertools.chain(reward, annotation.tensors, annotation.info)
    words = ", ".join(name[:_SHOWN_CHARS] for name in itertools.islice(names, _SHOWN_CHARS))
    return words if len(words) <= _SHOWN_CHARS else f"{words[:_SHOWN_CHARS]}..."
