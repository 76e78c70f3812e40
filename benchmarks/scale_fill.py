"""A store that holds very many small experiences, written without a server, in about a minute."""

from __future__ import annotations

import random
import struct
from collections.abc import Awaitable, Sequence
from pathlib import Path

import torch
import xxhash

from benchmarks.workload import GROUP_SIZE
from experience_buffer import EID, Experience, trxp
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.consumer import ConsumerSettings
from experience_buffer_server.store.interface import (
    AdvantageRow,
    BufferRow,
    GroupRow,
    Record,
    WriteBatch,
    cut_of,
)
from experience_buffer_server.store.lmdb.store import LmdbStore

BUFFER = "scale"
CONSUMER = "trainer"
NUM_TOKENS, NUM_RESPONSE_TOKENS = 24, 16
_BUFFER_ID = 1
_GROUPS_PER_COMMIT = 500
_MAX_PENDING = 8
_GROUPS_PER_BATCH = 512
"""Tasks of one training batch; its experiences have one policy version."""
_START_TIME = 1.75e9
_TASK, _SUFFIX = "task-0000000", "x0000000"
"""Stand-ins in the payloads: what replaces them is as long."""


async def fill(path: Path, num_groups: int) -> int:
    """Store groups of advantages that are already computed; returns the bytes of one payload."""
    payloads = [_template(run) for run in range(GROUP_SIZE)]
    generator = random.Random(7)
    store = await LmdbStore.open(path, durability="interval")
    try:
        batch = store.batch()
        batch.put_buffer(_buffer_row())
        pending: list[Awaitable[None]] = []
        for number in range(num_groups):
            _put_group(batch, number, payloads, generator)
            if (number + 1) % _GROUPS_PER_COMMIT == 0:
                pending.append(store.commit(batch))
                batch = store.batch()
            if len(pending) == _MAX_PENDING:
                await pending.pop(0)
        for commit in (*pending, store.commit(batch)):
            await commit
    finally:
        await store.close()
    return len(payloads[0])


def _buffer_row() -> BufferRow:
    settings = BufferSettings.model_validate(
        {"group_size": GROUP_SIZE, "advantage": {"estimator": "grpo"}}
        | {"consumers": (ConsumerSettings(name=CONSUMER),)}
    )
    return BufferRow(
        id=_BUFFER_ID,
        name=BUFFER,
        config=settings.model_dump_json(),
        policy_version=10**6,
        create_time=_START_TIME,
    )


def _put_group(
    batch: WriteBatch, number: int, payloads: Sequence[bytes], generator: random.Random
) -> None:
    task = f"task-{number:07d}"
    row = GroupRow(
        id=number + 1,
        key=f"b/{task}",
        size=GROUP_SIZE,
        open_time=_START_TIME + number,
        closed="whole",
    )
    batch.put_group(_BUFFER_ID, row)
    for run, template in enumerate(payloads):
        suffix = f"x{generator.getrandbits(28):07x}"
        payload = template.replace(_TASK.encode(), task.encode())
        payload = payload.replace(_SUFFIX.encode(), suffix.encode())
        seq = number * GROUP_SIZE + run + 1
        eid = EID(batch="b", task=task, run=run, step=0, suffix=suffix)
        reward = generator.randrange(5) / 4
        batch.append(_BUFFER_ID, _record(seq, eid, reward, row, payload, generator), payload)
        advantage = struct.pack("<f", reward - 0.5) * NUM_RESPONSE_TOKENS
        details = {"estimator": "grpo", "members": GROUP_SIZE, "votes": GROUP_SIZE} | {
            **{"mean": 0.5, "std": 0.25, "singleton": False, "zero_variance": False},
            **{"mean_advantage": reward - 0.5, "mean_magnitude": abs(reward - 0.5)},
        }
        computed = AdvantageRow(seq=seq, advantages=advantage, returns=advantage, details=details)
        batch.put_advantages(_BUFFER_ID, computed, magnitude=abs(reward - 0.5))


def _record(
    seq: int, eid: EID, reward: float, group: GroupRow, payload: bytes, generator: random.Random
) -> Record:
    version = 1000 + group.id // _GROUPS_PER_BATCH
    return Record(
        seq=seq,
        uid=eid.uid,
        cut=cut_of(str(eid.batch), str(eid.task)),
        digest_number=xxhash.xxh3_128_intdigest(payload),
        group_id=group.id,
        tombstone=False,
        reward=reward,
        response_tokens=NUM_RESPONSE_TOKENS,
        payload_bytes=len(payload),
        min_version=version,
        max_version=version + (group.id % 4 == 0),
        push_time=group.open_time,
        priority=generator.random(),
    )


def _template(run: int) -> bytes:
    experience = Experience(
        eid=EID(batch="b", task=_TASK, run=run, step=0, suffix=_SUFFIX),
        tokens=torch.arange(NUM_TOKENS, dtype=torch.int32),
        action_mask=torch.ones(NUM_RESPONSE_TOKENS, dtype=torch.bool),
        prompt_length=NUM_TOKENS - NUM_RESPONSE_TOKENS,
        reward=0.5,
    )
    payload = trxp.encode([experience])
    if payload.count(_TASK.encode()) != 1 or payload.count(_SUFFIX.encode()) != 1:
        raise ValueError("the payload doesn't hold its task and suffix as they are")
    return payload
