"""A start after damage: a group that has lost a member isn't delivered without saying so."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.store.lmdb.disk.format import Table, numbered_key, payload_key
from tests.damaging import flip, flip_key
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, push, uid

pytestmark = pytest.mark.on_disk

GROUPS: dict[str, Any] = {
    "group_by": "task",
    "group_size": 3,
    "consumers": [{"name": "trainer", "unit": "group"}],
}


@pytest.mark.parametrize("also", ["payload", "payload's key", "nothing"])
async def test_a_lost_member_is_missed_whatever_else_is_lost(world: World, also: str) -> None:
    buffer = await world.create(**GROUPS)
    for task in (1, 2):
        await buffer.push(push(*((task, run) for run in range(3))))
    await buffer.drain()
    await world.store.close()
    place = payload_key(1, uid(1, 1))
    flip(world.path, Table.RECORDS, numbered_key(1, 2))
    if also == "payload":
        flip(world.path, Table.PAYLOADS, place)
    elif also == "payload's key":
        flip_key(world.path, Table.PAYLOADS, place, byte=4, bit=0x01)
    await world.open()
    fresh = world.reload(buffer)
    damage = {group.row.key: group.damage for group in fresh.state.contents.groups}
    assert damage["2/2"] == ""
    if also == "payload's key":
        assert "can't be read back, nor what they were of" in damage["2/1"]
    else:
        assert f"the record of its member {uid(1, 1)!r} can't be read back" in damage["2/1"]
    lease = await leased(fresh, 2, timeout_seconds=0.05)
    assert [unit.seqs for unit in lease.units] == [(4, 5, 6)]
