"""What a buffer takes in: its room, its consumers' limiters, the pacing of new tasks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.push_reading import Outcome, Push
from experience_buffer_server.buffer.intake.push_room import Patience
from tests.unit.buffer_verbs import consume, leased, pushed, sampled, stored, take
from tests.unit.builders import (
    NUM_RESPONSE,
    World,
    begun,
    eid,
    experience,
    payload,
    push,
    settings,
    settle,
)
from tests.unit.work import counted_lines

FIVE = {"info": {"model_version": 5}}
GROUPED: dict[str, Any] = {
    "group_size": 4,
    "advantage": {"estimator": "grpo"},
    "consumers": [{"name": "trainer", "unit": "item"}],
}


def limited(**limiter: Any) -> list[dict[str, Any]]:
    return [{"name": "trainer", "limiter": {"min_diff": 0.0, "max_diff": 4.0} | limiter}]


def paced(**pacing: Any) -> dict[str, Any]:
    return {"consumer": "trainer", "max_staleness": 0, "batch_size": 2} | pacing


# --- room


async def test_a_push_that_can_never_fit_evicts_nothing(world: World) -> None:
    buffer = await world.create(group_by="none", max_items=5, on_full="evict")
    await buffer.push(pushed(*[(task, 0) for task in range(5)]))
    with pytest.raises(errors.BufferFullError, match="split the push") as refused:
        await buffer.push(pushed(*[(task, 1) for task in range(6)]))
    assert refused.value.retry_delay_seconds is None
    await buffer.drain()
    assert buffer.num_items == 5


async def test_what_could_leave_stays_when_that_is_not_enough(world: World) -> None:
    buffer = await world.create(group_by="none", max_items=5, on_full="evict")
    await buffer.push(pushed(*[(task, 0) for task in range(5)]))
    await take(buffer, 3)
    with pytest.raises(errors.BufferFullError):
        await buffer.push(pushed(*[(task, 1) for task in range(3)]))
    await buffer.drain()
    assert buffer.num_items == 5
    await buffer.push(pushed((7, 1), (8, 1)))
    await buffer.drain()
    assert [entry.record.task for entry in buffer.state.contents] == ["0", "1", "2", "7", "8"]


# --- open groups

POLICIES = ["refuse", "block", "evict"]
TRAINER = [{"name": "trainer", "unit": "group"}]


async def filled(world: World, on_full: str, **changes: Any) -> Buffer:
    """A buffer that the first members of four groups of two have filled."""
    given: dict[str, Any] = {"group_size": 2, "max_items": 4, "consumers": TRAINER}
    buffer = await world.create(**(given | {"on_full": on_full} | changes))
    await buffer.push(push(*((task, 0) for task in range(4))))
    return buffer


def patience(seconds: float = 60.0) -> Patience:
    return Patience(deadline=time.monotonic() + seconds, stop=asyncio.Event())


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome.status.value for outcome in outcomes]


SIZE = len(payload((1, 0)))


@pytest.mark.parametrize("on_full", POLICIES)
@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"max_items": 0, "max_bytes": 4 * SIZE + 9},
        {"consumers": [{"name": "trainer"}], "advantage": {"estimator": "rloo"}},
        {"group_by": "run"},
    ],
)
async def test_what_completes_a_group_goes_in_when_open_groups_fill_the_buffer(
    world: World, on_full: str, limit: dict[str, Any]
) -> None:
    buffer = await filled(world, on_full, **limit)
    completing = push((0, 1), (2, 1))
    if "group_by" in limit:
        completing = Push(payloads=[trxp.encode([experience(task, 0, step=1) for task in (0, 2)])])
    assert statuses(await buffer.push(completing, patience())) == ["stored"] * 2
    await buffer.drain()
    assert sorted(group.num_members for group in buffer.state.contents.groups) == [1, 1, 2, 2]


@pytest.mark.parametrize("on_full", ["refuse", "block"])
async def test_what_completes_a_group_does_not_wait_for_the_rest_of_its_push(
    world: World, on_full: str
) -> None:
    buffer = await filled(world, on_full)
    with pytest.raises(errors.BufferFullError, match="1 of it complete groups and are stored"):
        await buffer.push(push((7, 0), (0, 1), (8, 0)))
    await buffer.drain()
    assert stored(buffer)[4:] == [(0, 1)]
    waiting = await begun(buffer.push(push((7, 0), (1, 1), (0, 1)), patience()))
    if on_full == "refuse":
        with pytest.raises(errors.BufferFullError):
            await waiting
        return
    await buffer.drain()
    assert stored(buffer)[5:] == [(1, 1)]
    await consume(buffer, 2)
    assert statuses(await asyncio.wait_for(waiting, 10)) == ["stored", "stored", "duplicate"]
    assert stored(buffer) == [(2, 0), (3, 0), (7, 0)]


async def test_a_limiter_keeps_no_members_because_of_their_neighbours(world: World) -> None:
    buffer = await world.create(group_size=2, consumers=[TRAINER[0] | limited(max_diff=2.0)[0]])
    await buffer.push(push((1, 0), (2, 0)))
    with pytest.raises(errors.ResourceExhaustedError, match="1 of it complete groups"):
        await buffer.push(push((3, 0), (2, 1)))
    await buffer.drain()
    assert stored(buffer) == [(1, 0), (2, 0), (2, 1)]


async def test_members_pass_those_who_wait_in_line(world: World) -> None:
    buffer = await filled(world, "block")
    waiting = await begun(buffer.push(push((9, 0)), patience()))
    assert statuses(await buffer.push(push((3, 1)), patience())) == ["stored"]
    assert not waiting.done()
    await consume(buffer)
    await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 0},
        {"consumers": [{"name": "trainer"}]},
    ],
    ids=["size not known", "nobody waits for groups"],
)
async def test_what_completes_nothing_is_refused(world: World, changes: dict[str, Any]) -> None:
    """Groups of no known size would have no bound, and single experiences can leave by themselves."""
    buffer = await filled(world, "refuse", **changes)
    with pytest.raises(errors.BufferFullError, match=r"4 \+ 1 exceed max_items = 4"):
        await buffer.push(push((0, 1)))


async def test_a_group_of_tombstones_takes_no_room_and_gives_none(world: World) -> None:
    """Else what is beyond the limit would have no bound."""
    buffer = await filled(world, "refuse")
    await buffer.push(push(dead=[(9, 0)]))
    with pytest.raises(errors.BufferFullError):
        await buffer.push(push((9, 1)))


@pytest.mark.parametrize("on_full", POLICIES)
async def test_an_empty_sample_says_that_pushes_are_refused(world: World, on_full: str) -> None:
    buffer = await filled(world, on_full)
    _, why = await sampled(buffer)
    fate = "wait for room" if on_full == "block" else "are refused"
    words = f"4 experiences of max_items = 4, pushes that complete no open group {fate}"
    assert (words in why) is (on_full != "evict"), "an open group makes room there"
    assert (words in buffer.stats().pushes_wait_for) is (on_full != "evict")
    assert "4 groups incomplete" in why
    await buffer.push(push((0, 1)))
    await consume(buffer)
    assert "the buffer is full" not in (await sampled(buffer))[1]


@pytest.mark.parametrize("on_full", ["refuse", "block"])
async def test_a_full_buffer_of_single_experiences_says_so_too(world: World, on_full: str) -> None:
    buffer = await world.create(
        group_by="none",
        on_full=on_full,
        max_bytes=2 * SIZE + 9,
        advantage={"estimator": "reinforce"},
    )
    await buffer.push(push((1, 0), (2, 0)))
    _, why = await sampled(buffer, 3)
    assert f"{2 * SIZE} bytes of max_bytes = {2 * SIZE + 9}, pushes " in why


async def test_a_group_that_can_never_have_room_is_refused_at_once(world: World) -> None:
    buffer = await world.create(max_items=4, consumers=TRAINER)
    with pytest.raises(errors.InvalidRequestError, match="group_size = 5 is over max_items = 4"):
        buffer.check_push(num_tombstones=0, group_size=5)
    await buffer.push(push((1, 0)))
    with pytest.raises(errors.InvalidRequestError, match="group_size = 5 is over max_items = 4"):
        await buffer.seal("2/1", 5)


async def test_one_that_never_has_room_keeps_no_neighbour_out(world: World) -> None:
    buffer = await world.create(group_by="none", max_bytes=3 * SIZE)
    large = pushed((2, 0), prompt_text="long " * SIZE)
    both = Push(payloads=[payload((1, 0)), *large.payloads, *large.payloads])
    found = await buffer.push(both)
    assert statuses(found) == ["stored", "refused", "refused"]
    assert f"is over max_bytes = {3 * SIZE} of the buffer, alone" in found[1].message
    assert stored(buffer) == [(1, 0)]


# --- limiters


async def test_a_limiter_lets_open_groups_be_completed(world: World) -> None:
    buffer = await world.create(**(GROUPED | {"consumers": limited()}))
    await buffer.push(push((1, 0), (2, 0), (3, 0), (4, 0)))
    with pytest.raises(errors.ResourceExhaustedError, match="more inserts until"):
        await buffer.push(push((5, 0)))
    for task in (1, 2, 3, 4):
        await buffer.push(push((task, 1), (task, 2), (task, 3)))
    assert buffer.num_items == 16


async def test_a_push_that_never_fits_a_limiter_is_not_told_to_wait(world: World) -> None:
    buffer = await world.create(group_by="none", consumers=limited(min_size=4))
    await buffer.push(pushed((1, 0), (2, 0)))
    with pytest.raises(errors.ResourceExhaustedError, match="split it") as refused:
        await buffer.push(pushed((3, 0), (4, 0), (5, 0), (6, 0)))
    assert refused.value.retry_delay_seconds is None
    await buffer.push(pushed((3, 0), (4, 0)))
    with pytest.raises(errors.ResourceExhaustedError) as later:
        await buffer.push(pushed((5, 0)))
    assert later.value.retry_delay_seconds == 0.1


@pytest.mark.parametrize("gate", ["limiter", "pacing"])
async def test_held_units_do_not_keep_newer_ones_out(world: World, gate: str) -> None:
    """After a rollback, the versions that come next are those that are waited for."""
    gates: dict[str, Any] = {
        "limiter": {"consumers": limited()},
        "pacing": {"pacing": paced(batch_size=4)},
    }
    buffer = await world.create(group_by="none", **gates[gate])
    buffer.row.policy_version = 5
    await buffer.push(pushed(*[(task, 0) for task in range(4)], **FIVE))
    buffer.row.policy_version = 3
    assert await take(buffer, 1) == 0
    assert len(buffer.state.consumers["trainer"].held) == 4
    await buffer.push(pushed((7, 0), info={"model_version": 3}))
    assert await take(buffer, 1)


# --- pacing


async def test_members_of_an_admitted_group_always_come(world: World) -> None:
    buffer = await world.create(**GROUPED, pacing=paced(batch_size=4))
    await buffer.push(push((1, 0), (2, 0), (3, 0), (4, 0)))
    with pytest.raises(errors.ResourceExhaustedError, match="admits 0 more items"):
        await buffer.push(push((5, 0)))
    await buffer.push(push((1, 1), (1, 2), (1, 3), (4, 1)))
    assert buffer.num_items == 8


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_a_reserved_place_is_taken_by_its_own_push(world: World, group_by: str) -> None:
    buffer = await world.create(group_by=group_by, pacing=paced(batch_size=1))
    reserved = buffer.flow.pacing.reserve([eid(7, 0).tid], now=time.time(), ttl_seconds=9.0)
    assert reserved.granted == [eid(7, 0).tid]
    with pytest.raises(errors.ResourceExhaustedError, match="1 are reserved"):
        await buffer.push(pushed((8, 0)))
    await buffer.push(pushed((7, 0)))
    assert (buffer.num_items, len(buffer.flow.pacing.reservations)) == (1, 0)


async def test_quarantined_units_free_their_places(world: World) -> None:
    consumers = [{"name": "trainer", "max_deliveries": 1}]
    buffer = await world.create(group_by="none", consumers=consumers, pacing=paced())
    await buffer.push(pushed((1, 0), (2, 0)))
    with pytest.raises(errors.ResourceExhaustedError):
        await buffer.push(pushed((3, 0)))
    await buffer.nack(await take(buffer, 2), reason="it kills me")
    assert len(buffer.state.consumers["trainer"].quarantined) == 2
    await buffer.push(pushed((3, 0), (4, 0)))


@pytest.mark.parametrize("unit", ["item", "group"])
async def test_what_cannot_be_computed_keeps_no_push_out(world: World, unit: str) -> None:
    world.computer.start()
    most = 4.0 if unit == "item" else 2.0
    limiter = {"min_diff": 0.0, "max_diff": most}
    buffer = await world.create(
        group_size=2,
        advantage={"estimator": "rloo", "kl_coef": 0.1, "kl_estimator": "k2"},
        consumers=[{"name": "trainer", "unit": unit, "limiter": limiter}],
    )
    bad = torch.full((NUM_RESPONSE,), 3e38)  # Its square is no float32 any more.
    members = [(1, 0), (1, 1), (2, 0), (2, 1)]
    await buffer.push(pushed(*members, logprobs=bad, info={"ref_logprobs": [0.0] * NUM_RESPONSE}))
    await settle(buffer)
    assert len(buffer.state.contents.quarantined) == 4
    await buffer.push(pushed((3, 0), (3, 1), info={"ref_logprobs": [0.0] * NUM_RESPONSE}))
    await settle(buffer)
    _, shortfall = await sampled(buffer, 9)
    assert "4 experiences can't be computed or read and are quarantined" in shortfall


async def test_a_push_larger_than_the_capacity_is_not_told_to_wait(world: World) -> None:
    buffer = await world.create(group_by="none", pacing=paced())
    with pytest.raises(errors.ResourceExhaustedError, match="split the push") as refused:
        await buffer.push(pushed((1, 0), (2, 0), (3, 0)))
    assert refused.value.retry_delay_seconds is None


def test_pacing_by_a_consumer_that_never_consumes_is_refused() -> None:
    consumers = [{"name": "trainer", "replay": True}]
    with pytest.raises(ValueError, match="give it max_times_sampled"):
        settings(consumers=consumers, pacing=paced())
    settings(consumers=[consumers[0] | {"max_times_sampled": 2}], pacing=paced())


# --- sampling


async def test_the_largest_batch_that_may_go_is_found_at_once(world: World) -> None:
    """Asking for very many must not keep the event loop."""
    buffer = await world.create(group_by="none")
    with counted_lines() as lines:
        assert await take(buffer, 1 << 40) == 0
        await buffer.push(pushed((1, 0), (2, 0), (3, 0)))
        assert (await leased(buffer, 1 << 40)).num_units == 3
    assert lines.num < 10_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_by": "none", "max_items": 3}, "max_items = 3 has room for 3 items; ask for fewer"),
        (
            {"group_size": 2, "max_items": 7, "consumers": TRAINER},
            "max_items = 7 has room for 3 groups of 2",
        ),
    ],
)
async def test_a_batch_that_the_buffer_never_holds_is_explained(
    world: World, changes: dict[str, Any], words: str
) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), **changes)
    _, why = await sampled(buffer, 4, min_batch_size=4)
    assert f"batches of 4 may never be: {words}" in why
    assert "may never be" not in (await sampled(buffer, 3, min_batch_size=3))[1]


@pytest.mark.parametrize(
    ("consumer", "words"),
    [
        ({"max_leased_experiences": 2}, "max_leased_experiences is 2; ask for fewer"),
        ({"limiter": {"min_diff": 0.0, "max_diff": 2.0}}, "batches of 4 may never be"),
    ],
)
async def test_a_batch_that_can_never_be_is_explained(
    world: World, consumer: dict[str, Any], words: str
) -> None:
    buffer = await world.create(group_by="none", consumers=[{"name": "trainer"} | consumer])
    await buffer.push(pushed((1, 0), (2, 0)))
    if "limiter" not in consumer:
        await buffer.push(pushed((3, 0), (4, 0)))
    lease, why = await sampled(buffer, 4, min_batch_size=4)
    assert lease is None
    assert words in why


@pytest.mark.parametrize("timeout_seconds", [0.0, 5.0])
async def test_what_fits_goes_once_the_rest_is_gone(world: World, timeout_seconds: float) -> None:
    """Neither a new call nor one that waits is kept by what was tried before."""
    buffer = await world.holding(pushed((1, 0)), group_by="none")
    await buffer.push(pushed((2, 0), prompt_text="long " * 400))
    await buffer.push(pushed((3, 0)))
    first, large, third = list(buffer.state.contents)
    bound = first.record.payload_bytes + third.record.payload_bytes + 9
    buffer.flow.offers.change_consumer(
        settings(consumers=[{"name": "trainer", "max_leased_bytes": bound}]).consumers[0]
    )
    assert await take(buffer, 1)
    assert await take(buffer, 1) == 0
    waiting = await begun(take(buffer, 1, timeout_seconds=timeout_seconds))
    if timeout_seconds:
        await buffer.delete([large])
        await buffer.push(pushed((4, 0)))
    else:
        assert await waiting == 0
        await buffer.delete([large])
        waiting = asyncio.ensure_future(take(buffer, 1))
    lease = buffer.state.leases.find(await waiting)
    assert lease is not None
    assert lease.units[0].seqs == (third.record.seq,)


@pytest.mark.parametrize("kept_for", ["rewind", "other"])
async def test_a_consumed_unit_that_is_kept_stops_no_pushes(world: World, kept_for: str) -> None:
    """Nothing is left to be sampled: who waits for that would wait until it isn't kept any more."""
    limiter = {"min_size": 2, "samples_per_insert": 1, "min_diff": -2, "max_diff": 0.5}
    others = [{"name": "other"}] if kept_for == "other" else []
    buffer = await world.create(consumers=[{"name": "trainer", "limiter": limiter}, *others])
    for task in range(3):
        await buffer.push(push((task, 0), (task, 1)))
        with pytest.raises(errors.ResourceExhaustedError, match="until more is sampled"):
            await buffer.push(push((task, 2)))
        await consume(buffer, 2, step=task)
        buffer = await world.restart(buffer)
    assert len(buffer.state.contents) == 6
