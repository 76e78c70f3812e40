"""A push of several payloads: one push, whose experiences are numbered through."""

from __future__ import annotations

import pytest

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.intake.push_reading import Push
from tests.unit.builders import World, eid, experience, payload, uid


async def test_items_are_numbered_across_payloads(world: World) -> None:
    buffer = await world.create(group_size=4)
    bad = experience(1, 2, reward=float("nan"))
    push = Push(
        payloads=[
            payload((1, 0), (1, 1)),
            payload(),
            trxp.encode([bad, experience(1, 0), experience(1, 1, reward=0.75)]),
            payload((2, 0)),
        ],
        tombstones=[(eid(1, 3), "gone")],
    )
    found = await buffer.push(push)
    assert [(one.uid, one.status.value, one.reason) for one in found] == [
        (uid(1, 0), "stored", None),
        (uid(1, 1), "stored", None),
        (uid(1, 2), "refused", "invalid"),
        (uid(1, 0), "duplicate", None),
        (uid(1, 1), "refused", "conflict"),
        (uid(2, 0), "stored", None),
        (uid(1, 3), "stored", None),
    ]
    assert world.payload(buffer, uid(2, 0)) == payload((2, 0))


@pytest.mark.parametrize(
    ("counts", "what"), [([50, 48], "98 experiences"), ([0] * 98, "98 payloads")]
)
async def test_the_limit_holds_for_all_together(world: World, counts: list[int], what: str) -> None:
    buffer = await world.create(group_by="none")
    payloads = [
        payload(*((task, run) for run in range(count))) for task, count in enumerate(counts)
    ]
    with pytest.raises(errors.InvalidRequestError, match=f"{what} in one push, the limit"):
        await buffer.push(Push(payloads=payloads))
    assert buffer.num_items == 0
    await buffer.push(Push(payloads=payloads[:-1]))


async def test_what_is_shared_is_in_proportion_to_all_together(world: World) -> None:
    world.limits = world.limits.model_copy(update={"max_message_bytes": 1 << 20})
    buffer = await world.create(group_by="none")
    shared = {"text": "x" * 1_000_000}
    payloads = [
        trxp.encode([experience(task, run, info=shared) for run in range(10)]) for task in range(4)
    ]
    with pytest.raises(errors.InvalidRequestError, match="push the group in parts"):
        await buffer.push(Push(payloads=payloads))
    assert buffer.num_items == 0
    found = await buffer.push(Push(payloads=payloads[:3]))
    assert len(found) == 30


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_that_cannot_be_read_fails_the_push(world: World, place: int) -> None:
    buffer = await world.create(group_by="none")
    payloads = [payload((1, 0)), payload((1, 1))]
    payloads.insert(place, payload((1, 2))[:-1])
    with pytest.raises(errors.TrxpError, match="the lengths add up to"):
        await buffer.push(Push(payloads=payloads))
    assert buffer.num_items == 0
