"""The way of a push: decode, admit, recognise repeats, join groups, commit, answer.

Everything up to the commit happens in one go on the event loop, so that pushes can't overtake
each other; what follows the commit happens even when the call that pushed has been cancelled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from experience_buffer import errors, trxp
from experience_buffer.eid import EID
from experience_buffer_server.admission import (
    Candidate,
    Reason,
    Refusal,
    admit,
    entomb,
    missing_fields,
)
from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry, Group, group_key, groups_of
from experience_buffer_server.intake import Intake
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import (
    BufferRow,
    Record,
    Store,
    StoreFullError,
    WriteBatch,
)
from experience_buffer_server.tasks import Tasks


class PushStatus(StrEnum):
    """What became of one item; the wire has the same names."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one pushed experience or tombstone."""

    uid: str
    status: PushStatus
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One request."""

    payload: bytes
    tombstones: Sequence[tuple[EID, str]] = ()
    """Failed rollouts: identity and reason."""
    group_size: int = 0


class Owner(Protocol):
    """The buffer that experiences are pushed to."""

    row: BufferRow
    settings: BufferSettings

    @property
    def id(self) -> int:
        """Its id in the store."""

    @property
    def name(self) -> str:
        """Its name."""

    def stored(self, entries: Sequence[Entry]) -> None:
        """The entries are on disk."""

    def check_whole(self, group: Group) -> None:
        """Go on with a group that is closed and all on disk."""


class Ingest:
    """The push path of one buffer. Not thread-safe; belongs to its event loop."""

    def __init__(
        self,
        owner: Owner,
        contents: Contents,
        intake: Intake,
        store: Store,
        metrics: Metrics,
        tasks: Tasks,
        *,
        max_items: int,
    ) -> None:
        self._owner = owner
        self._contents = contents
        self._intake = intake
        self._store = store
        self._metrics = metrics
        self._max_items = max_items
        self._tasks = tasks

    async def push(self, push: Push) -> list[Outcome]:
        """Store what can be stored; one outcome per experience, then one per tombstone.

        Raises:
            TrxpError: The payload as a whole can't be read; nothing is stored.
            InvalidRequestError: More items than a push may hold; nothing is stored.
            BufferFullError: No room; nothing of this push is stored.
            ResourceExhaustedError: A limiter or the pacing holds it back; nothing of it is stored.
        """
        self._metrics.pushed_bytes(self._owner.name, len(push.payload))
        candidates = self._candidates(push)
        repeats: dict[int, int] = {}
        outcomes = self._outcomes(candidates, repeats)
        fresh = [
            (index, candidate)
            for index, candidate in enumerate(candidates)
            if outcomes[index] is None and isinstance(candidate, Candidate)
        ]
        self._intake.check([candidate for _, candidate in fresh])
        batch, entries = self._store.batch(), []
        for index, joined in self._join_groups(batch, fresh, push.group_size):
            if isinstance(joined, Entry):
                entries.append(joined)
                outcomes[index] = Outcome(joined.record.uid, PushStatus.STORED)
            else:
                outcomes[index] = Outcome(
                    joined.uid, PushStatus.REFUSED, joined.reason, joined.message
                )
        for index, first in repeats.items():
            if (origin := outcomes[first]) is not None and origin.status is PushStatus.REFUSED:
                outcomes[index] = origin
        await self._make_durable(batch, entries, outcomes)
        return self._count([outcome for outcome in outcomes if outcome is not None])

    def _candidates(self, push: Push) -> list[Candidate | Refusal]:
        items = trxp.read(push.payload) if push.payload else []
        count = len(items) + len(push.tombstones)
        if count > self._max_items:
            raise errors.InvalidRequestError(
                f"{count} experiences in one push, the limit server.max_push_items is "
                f"{self._max_items}; split the push",
                subject="payload",
            )
        settings = self._owner.settings
        candidates = [
            Refusal(Reason.INVALID, str(item))
            if isinstance(item, errors.TrxpError)
            else admit(item, settings, published=self._owner.row.policy_version)
            for item in items
        ] + [entomb(eid, reason) for eid, reason in push.tombstones]
        if settings.group_by == "none":
            return [_without_tombstone(candidate) for candidate in candidates]
        return candidates

    def _outcomes(
        self, candidates: Sequence[Candidate | Refusal], repeats: dict[int, int]
    ) -> list[Outcome | None]:
        """Refusals, repeats and conflicts; None for what is new.

        `repeats` receives the items that repeat an earlier item of this push, whose fate they share.
        """
        uids = [candidate.uid for candidate in candidates if isinstance(candidate, Candidate)]
        remembered = iter(self._store.recall(self._owner.id, "uid", uids))
        in_this_push: dict[str, tuple[int, bytes]] = {}
        outcomes: list[Outcome | None] = []
        for index, candidate in enumerate(candidates):
            uid = candidate.uid
            if isinstance(candidate, Refusal):
                outcomes.append(
                    Outcome(uid, PushStatus.REFUSED, candidate.reason, candidate.message)
                )
                continue
            entry, past = self._contents.by_uid(uid), next(remembered)
            known = entry.record.digest if entry else past
            first, first_digest = in_this_push.setdefault(uid, (index, candidate.digest))
            if known is None and first != index:
                known = first_digest
                repeats[index] = first
            if known is None:
                outcomes.append(None)
            elif known == candidate.digest:
                outcomes.append(Outcome(uid, PushStatus.DUPLICATE))
            else:
                repeats.pop(index, None)
                where = "is stored" if entry else "was consumed" if past else "is in this push"
                message = (
                    f"uid {uid!r} {where} with other content; give the experience its own suffix"
                )
                outcomes.append(Outcome(uid, PushStatus.REFUSED, Reason.CONFLICT, message))
        return outcomes

    def _join_groups(
        self, batch: WriteBatch, fresh: Sequence[tuple[int, Candidate]], stated_size: int
    ) -> Iterable[tuple[int, Entry | Refusal]]:
        """Give each new candidate its place; rows of changed groups go into the batch."""
        now = time.time()
        group_by = self._owner.settings.group_by
        changed: dict[int, Group] = {}
        for index, candidate in fresh:
            record = self._record(candidate, now)
            group = None
            if group_by != "none":
                joined = self._join(group_key(record, group_by), stated_size, now)
                if isinstance(joined, Refusal):
                    yield index, Refusal(joined.reason, joined.message, record.uid)
                    continue
                group = joined
                record.group_id = group.row.id
            record.seq = self._contents.next_seq()
            entry = Entry(record, group)
            batch.append(self._owner.id, record, candidate.payload)
            self._contents.add(entry)
            if not record.tombstone:
                missing = missing_fields(record.fields, self._owner.settings)
                self._contents.set_missing(entry, missing)
            if group is not None:
                closed = self._contents.groups.add_member(group, entry)
                if closed or group.row.id not in changed:
                    changed[group.row.id] = group
                if closed:
                    self._metrics.group_closed(self._owner.name, "whole")
            yield index, entry
        for group in changed.values():
            batch.put_group(self._owner.id, group.row)

    def _join(self, key: str, stated_size: int, now: float) -> Group | Refusal:
        remembered = ""
        if self._contents.groups.get(key) is None:
            value = self._store.recall(self._owner.id, "group", (key,))[0]
            remembered = value.decode() if value else ""
        return self._contents.groups.join(
            key,
            stated_size,
            settings=self._owner.settings,
            now=now,
            remembered=remembered,
        )

    @staticmethod
    def _record(candidate: Candidate, now: float) -> Record:
        eid = candidate.eid
        return Record(
            seq=0,
            uid=candidate.uid,
            batch=str(eid.batch),
            task=str(eid.task),
            run=eid.run,
            step=eid.step,
            digest=candidate.digest,
            group_id=0,
            tombstone=candidate.tombstone,
            reward=candidate.reward,
            response_tokens=candidate.response_tokens,
            payload_bytes=len(candidate.payload),
            min_version=candidate.min_version,
            max_version=candidate.max_version,
            push_time=now,
            note=candidate.note,
            fields=candidate.fields,
            priority=candidate.priority,
        )

    async def _make_durable(
        self, batch: WriteBatch, entries: list[Entry], outcomes: Sequence[Outcome | None]
    ) -> None:
        """Commit; also wait for repeats whose first push is still being committed."""
        pending = [
            entry
            for outcome in outcomes
            if outcome is not None and outcome.status is PushStatus.DUPLICATE
            if (entry := self._contents.by_uid(outcome.uid)) is not None and not entry.durable
        ]
        if not entries and not pending:
            return
        # Submitted here and now: what is submitted later must come later in the store, too.
        await self._tasks.finish(self._commit(self._store.commit(batch), entries))
        if any(not entry.durable for entry in pending):
            raise errors.BufferFullError(
                f"buffer {self._owner.name!r}: the first push of a repeated experience could not "
                "be stored; push again",
                retry_delay_seconds=1.0,
            )

    async def _commit(self, committed: Awaitable[None], entries: list[Entry]) -> None:
        try:
            await committed
        except BaseException as error:
            self._withdraw(entries)
            if isinstance(error, StoreFullError):
                raise errors.BufferFullError(
                    f"buffer {self._owner.name!r}: {error}",
                    subject=self._owner.name,
                    retry_delay_seconds=5.0,
                ) from error
            raise
        self._owner.stored(entries)

    def _withdraw(self, entries: list[Entry]) -> None:
        """The commit failed: forget its entries; what later pushes stored of their groups is wrong."""
        batch = self._store.batch()
        for entry in entries:
            entry.leaving = True
            self._contents.remove(entry)
            if entry.group is not None:
                self._contents.groups.withdraw(entry.group, entry)
        groups = groups_of(entries)
        for group in groups:
            if group.is_over:
                batch.delete_group(self._owner.id, group.row.id)
            else:
                batch.put_group(self._owner.id, group.row)
        if groups:
            self._tasks.spawn(self._store.commit(batch))
        for group in groups:
            self._owner.check_whole(group)

    def _count(self, outcomes: list[Outcome]) -> list[Outcome]:
        kinds = Counter((outcome.status, outcome.reason or "") for outcome in outcomes)
        for (status, reason), count in kinds.items():
            self._metrics.pushed(self._owner.name, status, reason, count)
        return outcomes


def _without_tombstone(candidate: Candidate | Refusal) -> Candidate | Refusal:
    """In a buffer without groups a tombstone has nothing to complete and would never leave."""
    if isinstance(candidate, Refusal) or not candidate.tombstone:
        return candidate
    return Refusal(
        Reason.INVALID,
        f"a tombstone ({candidate.note}) completes its group, but this buffer has group_by = "
        '"none"; leave it out',
        candidate.uid,
    )
