"""Joining: each new experience gets its group, its number and its rows.

Everything happens at once, for a whole push, before anything is committed. Belongs to one buffer and
its event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from experience_buffer_server import steady_clock
from experience_buffer_server.admission import Candidate, Refusal, missing_fields
from experience_buffer_server.buffer_settings import BufferSettings
from experience_buffer_server.contents import Contents
from experience_buffer_server.groups import Entry, Group, group_key_of
from experience_buffer_server.metrics import Metrics
from experience_buffer_server.store.base import Record, Store, WriteBatch


class Owner(Protocol):
    """The buffer that experiences join."""

    settings: BufferSettings

    @property
    def id(self) -> int:
        """Its id in the store."""

    @property
    def name(self) -> str:
        """Its name."""


class Joining:
    """Takes in the new experiences of one buffer. Not thread-safe."""

    def __init__(self, owner: Owner, contents: Contents, store: Store, metrics: Metrics) -> None:
        self._owner = owner
        self._contents = contents
        self._store = store
        self._metrics = metrics

    def join(
        self, batch: WriteBatch, fresh: Sequence[tuple[int, Candidate]], stated_size: int
    ) -> Iterable[tuple[int, Entry | Refusal]]:
        """Give each new candidate its place; rows of changed groups go into the batch."""
        now = steady_clock.now()
        keys = self._group_keys(fresh)
        closed_before = self._closed_before(keys)
        changed: dict[int, Group] = {}
        for (index, candidate), key in zip(fresh, keys, strict=True):
            record = record_of(candidate, now)
            group = None
            if key is not None:
                joined = self._contents.groups.join(
                    key,
                    stated_size,
                    settings=self._owner.settings,
                    now=now,
                    remembered=closed_before.get(key, ""),
                )
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

    def _group_keys(self, fresh: Sequence[tuple[int, Candidate]]) -> Sequence[str | None]:
        """The key of each candidate's group; None where the buffer has no groups."""
        group_by = self._owner.settings.group_by
        if group_by == "none":
            return [None] * len(fresh)
        return [group_key_of(candidate.eid, group_by) for _, candidate in fresh]

    def _closed_before(self, keys: Iterable[str | None]) -> Mapping[str, str]:
        """How groups that aren't here any more were closed, by key."""
        groups = self._contents.groups
        unknown = [
            key for key in dict.fromkeys(keys) if key is not None and groups.get(key) is None
        ]
        if not unknown:
            return {}
        values = self._store.recall(self._owner.id, "group", unknown)
        return {key: value.decode() for key, value in zip(unknown, values, strict=True) if value}


def record_of(candidate: Candidate, now: float) -> Record:
    """Its row, but for its number and its group."""
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
