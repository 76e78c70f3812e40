"""A store that already holds experiences of the workload, written without a server."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from benchmarks import experiences
from benchmarks.workload import POOL_GROUPS, Size
from experience_buffer import trxp
from experience_buffer.consumer_options import SelectorKind
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings, SelectorSettings
from experience_buffer_server.store.interface import BufferRow, GroupRow, Record, WriteBatch, cut_of
from experience_buffer_server.store.lmdb.store import LmdbStore

BUFFER = "bench"
"""As the clients of the comparison name it."""
CONSUMER = "trainer"
FILLERS = (1_000_000, 1_000_001)
"""The writers in the identities of what was stored before, in turn; those of others are below."""
_PLACEHOLDER = "98765432"
"""Stands for the group's number in a payload: what replaces it is as long."""
_BUFFER_ID = 1
_GROUPS_PER_COMMIT = 250
_MAX_PENDING = 8
_START_TIME = 1.75e9


@dataclass(frozen=True, slots=True)
class _Template:
    """One member of a group of the pool, of which only the group's number is missing."""

    before: bytes
    after: bytes
    candidate: Candidate


async def fill(path: Path, size: Size, num_groups: int, *, selector: SelectorKind = "fifo") -> None:
    """Store groups that are whole, with the workload's content, as the server stores pushed ones."""
    settings = _settings(size, selector)
    templates = [
        [_template(size, number, run, settings) for run in range(size.group_size)]
        for number in range(POOL_GROUPS)
    ]
    store = await LmdbStore.open(path, durability="interval")
    try:
        batch = store.batch()
        batch.put_buffer(_buffer_row(settings))
        pending: list[Awaitable[None]] = []
        for number in range(num_groups):
            _put_group(batch, number, templates[number % POOL_GROUPS])
            if (number + 1) % _GROUPS_PER_COMMIT == 0:
                pending.append(store.commit(batch))
                batch = store.batch()
            if len(pending) == _MAX_PENDING:
                await pending.pop(0)
        for commit in (*pending, store.commit(batch)):
            await commit
    finally:
        await store.close()


def _settings(size: Size, selector: SelectorKind) -> BufferSettings:
    consumer = ConsumerSettings(
        name=CONSUMER, unit="group", selector=SelectorSettings(kind=selector)
    )
    return BufferSettings(group_size=size.group_size, consumers=(consumer,))


def _buffer_row(settings: BufferSettings) -> BufferRow:
    return BufferRow(
        id=_BUFFER_ID,
        name=BUFFER,
        config=settings.model_dump_json(),
        policy_version=None,
        create_time=_START_TIME,
    )


def _template(size: Size, number: int, run: int, settings: BufferSettings) -> _Template:
    rollout = experiences.contents(size)[number][run]
    identity = replace(experiences.eid(_filler(number), number, run), task=_PLACEHOLDER)
    (item,) = trxp.read(trxp.encode([experiences.experience(rollout, identity)]))
    assert isinstance(item, trxp.Item)
    candidate = admit(item, settings)
    assert isinstance(candidate, Candidate)
    before, found, after = bytes(candidate.payload).partition(_PLACEHOLDER.encode())
    if not found or _PLACEHOLDER.encode() in after:
        raise ValueError("the payload doesn't hold its group's number once, as text")
    return _Template(before, after, candidate)


def _filler(number: int) -> int:
    """Whose a group is: groups of equal content are the same one's."""
    assert POOL_GROUPS % len(FILLERS) == 0
    return FILLERS[number % len(FILLERS)]


def _put_group(batch: WriteBatch, number: int, templates: Sequence[_Template]) -> None:
    task = f"{number:08d}"
    row = GroupRow(
        id=number + 1,
        key=f"{_filler(number)}/{task}",
        size=len(templates),
        open_time=_START_TIME + number,
        closed="whole",
    )
    batch.put_group(_BUFFER_ID, row)
    for run, template in enumerate(templates):
        payload = template.before + task.encode() + template.after
        seq = number * len(templates) + run + 1
        batch.append(_BUFFER_ID, _record(seq, row, task, template.candidate, payload), payload)


def _record(seq: int, group: GroupRow, task: str, like: Candidate, payload: bytes) -> Record:
    return Record(
        seq=seq,
        uid=like.uid.replace(_PLACEHOLDER, task),
        cut=cut_of(str(like.eid.batch), task),
        digest_number=xxhash.xxh3_128_intdigest(payload),
        group_id=group.id,
        tombstone=False,
        reward=like.reward,
        response_tokens=like.response_tokens,
        payload_bytes=len(payload),
        min_version=like.min_version,
        max_version=like.max_version,
        push_time=group.open_time,
        fields=like.fields,
        priority=like.priority,
    )
