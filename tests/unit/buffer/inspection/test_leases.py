"""Who holds what: leases as they are told, page by page."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import ConsumerNotFoundError, LeaseNotFoundError
from experience_buffer.looking import LeaseInfo
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.runtime import callers
from experience_buffer_server.runtime.callers import Caller
from tests.unit.buffer_verbs import leased, sampled
from tests.unit.builders import World, push, uid

PAIRS: dict[str, Any] = {
    "group_size": 2,
    "consumers": [{"name": "trainer", "unit": "group"}, "critic"],
}


async def told(buffer: Buffer, **asked: Any) -> list[LeaseInfo]:
    wanted: dict[str, Any] = {"consumer": "", "lease_id": 0, "after": 0, "size": 100}
    return list((await present.lease_page(buffer, **(wanted | asked))).found)


async def test_a_lease_says_who_holds_what_since_when(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0)), **PAIRS)
    callers.entered(Caller("alice", "ipv6:%5B::1%5D:4711"))
    callers.named("gpu-3:88", on_stream=True)
    first = await leased(buffer)
    callers.entered(Caller("10.0.0.7", "ipv4:10.0.0.7:99"))
    second = await leased(buffer, 2, "critic")
    group, items = await told(buffer)
    assert (group.id, group.consumer, group.unit, group.world_size) == (
        first.id,
        "trainer",
        "group",
        0,
    )
    assert (group.holder, group.address, group.caller) == ("gpu-3:88", "[::1]:4711", "alice")
    assert (group.on_stream, group.is_ending) == (True, False)
    assert [(unit.key, unit.num_experiences, unit.num_deliveries) for unit in group.units] == [
        ("2/1", 2, 1)
    ]
    assert group.grant_time is not None
    assert group.expire_time == pytest.approx(group.grant_time + 100.0)
    assert group.age_seconds == pytest.approx(0.0, abs=5.0)
    assert (items.holder, items.address, items.caller) == ("", "10.0.0.7:99", "")
    assert [unit.key for unit in items.units] == [uid(1, 0), uid(1, 1)]
    assert (items.num_units, items.num_experiences, items.max_deliveries) == (2, 2, 1)
    assert items.num_bytes == sum(e.record.payload_bytes for e in list(buffer.state.contents)[:2])
    assert [one.id for one in await told(buffer, consumer="critic")] == [second.id]
    assert [one.id for one in await told(buffer, lease_id=first.id)] == [first.id]
    with pytest.raises(ConsumerNotFoundError):
        await told(buffer, consumer="nobody")
    with pytest.raises(LeaseNotFoundError, match="no open lease 7"):
        await told(buffer, lease_id=7)
    await buffer.drop("2/1", "aborted")
    assert [unit.is_gone for unit in (await told(buffer))[0].units] == [True]
    await buffer.ack(first.id)
    with pytest.raises(LeaseNotFoundError):
        await told(buffer, lease_id=first.id)
    assert [one.id for one in await told(buffer)] == [second.id]


async def test_a_shared_lease_says_which_rank_has_received_and_acknowledged_its_part(
    world: World,
) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0), (2, 1)), **PAIRS)
    for rank in (1, 0):
        callers.named(f"gpu-{rank}")
        rank_of = RankOf(rank=rank, world_size=3, after_lease_id=0)
        lease, _ = await sampled(buffer, 2, rank_of=rank_of)
    assert lease is not None
    await buffer.ack(lease.id, step=4, rank=0)
    (info,) = await told(buffer)
    assert (info.holder, info.world_size, sum(part.num_units for part in info.parts)) == (
        "gpu-1",
        3,
        2,
    )
    assert [(p.rank, p.holder, p.is_acked, p.step) for p in info.parts] == [
        (0, "gpu-0", True, 4),
        (1, "gpu-1", False, None),
        (2, "", False, None),
    ]
    assert [part.receive_time is None for part in info.parts] == [False, False, True]
    assert [unit.rank for unit in info.units] == sorted(unit.rank for unit in info.units)
    assert "gpu-1" in repr(info)


async def test_after_a_restart_nobody_knows_who_had_it_since_when(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), **PAIRS)
    callers.named("gpu-3:88")
    await leased(buffer)
    buffer = await world.restart(buffer)
    (info,) = await told(buffer)
    assert (info.holder, info.grant_time, info.age_seconds) == ("", None, None)
    assert "granted before the server started" in repr(info)
    assert info.expires_in_seconds > 0


async def test_leases_come_page_by_page_whatever_ends_in_between(world: World) -> None:
    buffer = await world.holding(push(*((task, 0) for task in range(7))), group_by="none")
    leases = [await leased(buffer) for _ in range(7)]
    seen: list[int] = []
    page = await present.lease_page(buffer, consumer="", lease_id=0, after=0, size=3)
    while True:
        seen += [info.id for info in page.found]
        if page.last is None:
            break
        await buffer.ack(page.found[-1].id)
        page = await present.lease_page(buffer, consumer="", lease_id=0, after=page.last, size=3)
    assert seen == [lease.id for lease in leases]


async def test_many_units_are_told_up_to_a_bound(world: World) -> None:
    world.limits = world.limits.model_copy(update={"max_push_items": 97})
    buffer = await world.holding(push(*((task, 0) for task in range(41))), group_by="none")
    lease = await leased(buffer, 41)
    (listed,) = await told(buffer)
    (alone,) = await told(buffer, lease_id=lease.id)
    assert (listed.num_units, len(listed.units), len(alone.units)) == (41, 32, 41)
