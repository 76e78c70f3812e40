from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import experiences
from benchmarks.growth_clients import Shape
from benchmarks.growth_fill import BUFFER, FILLERS, fill
from benchmarks.workload import POOL_GROUPS, SIZES, check
from experience_buffer import trxp
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.state.entries import Candidate
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.store.interface import StoredBuffer
from experience_buffer_server.store.lmdb.store import LmdbStore

SIZE = replace(SIZES["S"], group_size=3, batch_groups=POOL_GROUPS + 1)
NUM_GROUPS = POOL_GROUPS + 1
"""One more than there are different ones."""
SAME = (
    *("uid", "digest", "reward", "response_tokens", "min_version", "max_version"),
    *("tombstone", "note", "fields", "priority"),
)
"""What a record has of the experience that was admitted."""


async def _filled(path: Path) -> tuple[StoredBuffer, list[bytes]]:
    await fill(path, SIZE, NUM_GROUPS)
    store = await LmdbStore.open(path)
    try:
        (state,) = store.load()
        payloads = store.payloads(state.row.id, [record.uid for record in state.records])
    finally:
        await store.close()
    found = [payload for payload in payloads if isinstance(payload, bytes)]
    assert len(found) == len(payloads)
    return state, found


async def test_a_filled_store_holds_the_workload(tmp_path: Path) -> None:
    state, payloads = await _filled(tmp_path)
    stored = [experience for payload in payloads for experience in trxp.decode(payload)]
    assert [e.eid.uid for e in stored] == [record.uid for record in state.records]
    assert {e.eid.batch for e in stored} == {*FILLERS}
    check([experiences.received(e) for e in stored], SIZE, experiences.contents(SIZE))


async def test_its_records_say_what_the_server_says_of_pushed_ones(tmp_path: Path) -> None:
    state, payloads = await _filled(tmp_path)
    settings = BufferSettings.model_validate_json(state.row.config)
    assert state.row.name == BUFFER
    for record, payload in zip(state.records, payloads, strict=True):
        (item,) = trxp.read(payload)
        assert isinstance(item, trxp.Item)
        pushed = admit(item, settings)
        assert isinstance(pushed, Candidate)
        assert {name: getattr(record, name) for name in SAME} == {
            name: getattr(pushed, name) for name in SAME
        }
        assert record.payload_bytes == len(pushed.payload) == len(payload)
        assert record.group_id == (record.seq - 1) // SIZE.group_size + 1
    assert [group.key for group in state.groups] == [
        f"{FILLERS[number % 2]}/{number:08d}" for number in range(NUM_GROUPS)
    ]
    assert {(group.size, group.closed) for group in state.groups} == {(3, "whole")}
    assert settings.group_size == 3
    assert settings.consumers[0].unit == "group"


@pytest.mark.parametrize(("group_size", "batch_groups"), [(1, 64), (8, 8), (64, 1)])
def test_a_batch_is_64_experiences_in_whole_groups(group_size: int, batch_groups: int) -> None:
    workload = Shape(name="any", group_size=group_size).workload
    assert (workload.batch_groups, workload.batch_size) == (batch_groups, 64)


def test_the_buffers_of_a_shape_begin_with_the_one_that_others_use() -> None:
    assert Shape(name="any", num_buffers=3).buffers == [BUFFER, f"{BUFFER}-1", f"{BUFFER}-2"]
