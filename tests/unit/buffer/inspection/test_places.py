"""Where an experience is, told for each consumer and as a whole."""

from __future__ import annotations

from typing import Any

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from tests.unit.buffer_verbs import consume, entry_of, leased, of_version, sampled
from tests.unit.builders import World, push, settle, uid

TWO: dict[str, Any] = {"group_by": "none", "consumers": ["trainer", "critic"]}


def states(buffer: Buffer) -> list[str]:
    return [buffer.state_of(entry) for entry in buffer.state.contents]


def places(buffer: Buffer, task: int, run: int) -> dict[str, str]:
    return {place.consumer: place.state for place in buffer.places_of(entry_of(buffer, task, run))}


async def test_what_any_consumer_holds_is_leased_and_told_for_each(world: World) -> None:
    buffer = await world.holding(push((1, 0), (2, 0), (3, 0)), **TWO)
    lease = await leased(buffer, 2)
    assert states(buffer) == ["leased", "leased", "ready"]
    assert places(buffer, 1, 0) == {"trainer": "leased", "critic": "ready"}
    held = buffer.places_of(entry_of(buffer, 1, 0))
    assert [(place.lease_id, place.num_deliveries) for place in held] == [(lease.id, 1), (0, 0)]
    await buffer.ack(lease.id, step=5)
    assert states(buffer) == ["ready"] * 3
    assert places(buffer, 1, 0) == {"trainer": "retained", "critic": "ready"}
    assert buffer.places_of(entry_of(buffer, 1, 0))[0].step == 5
    await consume(buffer, 3, "critic")
    assert states(buffer) == ["retained", "retained", "ready"]
    assert places(buffer, 2, 0) == {"trainer": "retained", "critic": "consumed"}
    assert places(buffer, 3, 0) == {"trainer": "ready", "critic": "consumed"}


async def test_raw_consumers_hold_what_the_others_wait_for(world: World) -> None:
    consumers = [{"name": "critic", "raw": True}, {"name": "trainer", "unit": "group"}]
    buffer = await world.holding(
        push((1, 0)), group_size=2, consumers=consumers, advantage={"estimator": "grpo"}
    )
    assert states(buffer) == ["waiting_for_group"]
    assert places(buffer, 1, 0) == {"critic": "ready", "trainer": "waiting_for_group"}
    lease = await leased(buffer, 1, "critic")
    assert states(buffer) == ["leased"]
    assert places(buffer, 1, 0) == {"critic": "leased", "trainer": "waiting_for_group"}
    await buffer.ack(lease.id)
    assert states(buffer) == ["waiting_for_group"]
    assert places(buffer, 1, 0) == {"critic": "consumed", "trainer": "waiting_for_group"}


async def test_what_is_replayed_is_ready_again_after_each_step(world: World) -> None:
    buffer = await world.holding(
        push((1, 0)), group_by="none", consumers=[{"name": "trainer", "replay": True}]
    )
    for step in (3, 7):
        lease = await leased(buffer)
        assert states(buffer) == ["leased"]
        await buffer.ack(lease.id, step=step)
        assert states(buffer) == ["ready"]
        assert buffer.places_of(entry_of(buffer, 1, 0))[0].step == step


async def test_ranks_that_share_a_lease_hold_it_until_the_last_has_acknowledged(
    world: World,
) -> None:
    buffer = await world.holding(push((1, 0), (2, 0)), **TWO)
    lease, _ = await sampled(buffer, 2, rank_of=RankOf(rank=1, world_size=2, after_lease_id=0))
    assert lease is not None
    assert states(buffer) == ["leased", "leased"]
    await buffer.ack(lease.id, step=1, rank=1)
    assert states(buffer) == ["leased", "leased"]
    await buffer.ack(lease.id, step=1, rank=0)
    assert states(buffer) == ["ready", "ready"]
    assert places(buffer, 1, 0) == {"trainer": "retained", "critic": "ready"}


async def test_what_is_held_for_its_version_or_passed_over_says_so(world: World) -> None:
    stale = {"max_age_seconds": 1e-9, "on_stale": "keep"}
    consumers = ["trainer", {"name": "critic", "staleness": stale}]
    buffer = await world.holding(of_version(3, (1, 0)), group_by="none", consumers=consumers)
    await buffer.publish(1)
    await buffer.push(of_version(2, (2, 0)))
    assert places(buffer, 2, 0) == {"trainer": "held", "critic": "held"}
    assert states(buffer)[1] == "held"
    message = buffer.places_of(entry_of(buffer, 2, 0))[0].message
    assert message == "waits for policy version 2 to be published"
    await buffer.publish(3)
    await sampled(buffer, 2, "critic")
    await buffer.drain()
    (_, passed) = buffer.places_of(entry_of(buffer, 1, 0))
    assert (passed.state, passed.message) == ("consumed", "passed over: it was too stale")
    assert states(buffer) == ["ready", "ready"]


async def test_a_group_that_lacks_members_isnt_its_consumers_though_items_are(
    world: World,
) -> None:
    consumers = ["trainer", {"name": "pairs", "unit": "group"}]
    buffer = await world.holding(push((1, 0), dead=[(1, 1)]), group_size=3, consumers=consumers)
    await settle(buffer)
    assert states(buffer) == ["ready", "tombstone"]
    assert places(buffer, 1, 0) == {"trainer": "ready", "pairs": "waiting_for_group"}
    assert places(buffer, 1, 1) == {}
    await consume(buffer, 1)
    assert states(buffer) == ["waiting_for_group", "tombstone"]
    await buffer.seal("2/1", 0)
    assert places(buffer, 1, 0) == {"trainer": "consumed", "pairs": "ready"}
    assert buffer.state.contents.by_uid(uid(1, 0)) is not None
