"""Joining: each new experience gets its group, its number and its rows.

Everything happens at once, for a whole push, before anything is committed. Belongs to one buffer and
its event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Candidate, Refusal
from experience_buffer_server.buffer.state.group_table import Entry, Group, group_key_of
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.store.interface import Record, Store, WriteBatch, cut_of


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where the new experiences of a push are going to go, as things are now."""

    keys: Sequence[str | None]
    """The key of each one's group; None where the buffer has no groups."""
    closed_before: Mapping[str, str]
    """How groups that aren't here any more were closed, by key."""
    joining: Sequence[Candidate]
    """Those that join a group, or need none; the others are going to be refused."""
    opening: Sequence[Candidate]
    """Of these, the ones in groups that the push opens; where there are no groups, all."""
    opened: Mapping[str, int]
    """How many groups the push opens, by key."""


def forecast(
    state: BufferState,
    store: Store,
    fresh: Sequence[tuple[int, Candidate]],
    stated_size: int,
) -> Forecast:
    """See where new candidates would go: what is to be refused needs no room, and no place."""
    candidates = [candidate for _, candidate in fresh]
    keys = _group_keys(state, fresh)
    closed_before = _closed_before(state, store, keys)
    by_key: dict[str, tuple[int, int, int]] = {}
    for key, count in Counter(keys).items():
        if key is not None:
            closed = closed_before.get(key, "")
            by_key[key] = state.contents.groups.forecast(
                key, count, stated_size, settings=state.settings, remembered=closed
            )
    opened = {key: num_opened for key, (_, _, num_opened) in by_key.items() if num_opened}
    if not by_key or sum(number for _, number, _ in by_key.values()) == len(candidates):
        # Mostly groups come whole, and all of them are new.
        return Forecast(keys, closed_before, candidates, candidates, opened)
    num_before: Counter[str | None] = Counter()
    joining, opening = [], []
    for candidate, key in zip(candidates, keys, strict=True):
        assert key is not None
        num_joining, num_opening, _ = by_key[key]
        place = num_before[key]
        num_before[key] = place + 1
        if place < num_joining + num_opening:
            joining.append(candidate)
            if place >= num_joining:
                opening.append(candidate)
    return Forecast(keys, closed_before, joining, opening, opened)


def join(
    state: BufferState,
    metrics: Metrics,
    batch: WriteBatch,
    fresh: Sequence[tuple[int, Candidate]],
    stated_size: int,
    seen: Forecast,
) -> Iterable[tuple[int, Entry | Refusal]]:
    """Give each new candidate its place; rows of changed groups go into the batch.

    Args:
        state: The buffer's.
        metrics: Count what happens to groups.
        batch: Gets the rows.
        fresh: The candidates, with their indices.
        stated_size: Of their groups; 0: not said.
        seen: The forecast of the same candidates, made just now.
    """
    now = clock.now()
    keys, closed_before = seen.keys, seen.closed_before
    changed: dict[int, Group] = {}
    contents, settings, buffer_id = state.contents, state.settings, state.id
    needs = settings.advantage.needs
    group, group_of = None, None
    for (index, candidate), key in zip(fresh, keys, strict=True):
        record = record_of(candidate, now)
        if key is not None:
            # The same as for the one before, as long as that group takes more.
            if group is None or key != group_of or group.row.closed:
                joined = contents.groups.join(
                    key,
                    stated_size,
                    settings=settings,
                    now=now,
                    remembered=closed_before.get(key, ""),
                )
                if isinstance(joined, Refusal):
                    group = None
                    yield index, Refusal(joined.reason, joined.message, record.uid)
                    continue
                group, group_of = joined, key
            record.group_id = group.row.id
        record.seq = contents.next_seq()
        entry = Entry(record, group)
        batch.append(buffer_id, record, candidate.payload)
        contents.add(entry)
        if needs is not None and not record.tombstone:
            contents.set_missing(entry, needs.missing(record.fields))
        if group is not None:
            closed = contents.groups.add_member(group, entry)
            if closed or group.row.id not in changed:
                changed[group.row.id] = group
            if closed:
                metrics.group_closed(state.name, "whole")
        yield index, entry
    for group in changed.values():
        batch.put_group(state.id, group.row)


def _group_keys(state: BufferState, fresh: Sequence[tuple[int, Candidate]]) -> Sequence[str | None]:
    """The key of each candidate's group; None where the buffer has no groups."""
    group_by = state.settings.group_by
    if group_by == "none":
        return [None] * len(fresh)
    return [group_key_of(candidate.eid, group_by) for _, candidate in fresh]


def _closed_before(
    state: BufferState, store: Store, keys: Iterable[str | None]
) -> Mapping[str, str]:
    """How groups that aren't here any more were closed, by key."""
    groups = state.contents.groups
    unknown = [key for key in dict.fromkeys(keys) if key is not None and groups.get(key) is None]
    if not unknown:
        return {}
    values = store.recall(state.id, "group", unknown)
    return {key: value.decode() for key, value in zip(unknown, values, strict=True) if value}


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
