"""What can't be read is set aside, alone: the rules, without a network."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.v1 import types_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import AnnotateReason, Annotation
from experience_buffer_server.buffer.state import departure
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.sampling.tally import Tally
from experience_buffer_server.store.batch import Kind
from experience_buffer_server.store.interface import Record
from tests.unit.buffer_verbs import entry_of, leased
from tests.unit.builders import World, push, uid
from tests.unit.sample_calls import called, frame_of, granting, serving


async def lose(world: World, buffer: Buffer, *members: tuple[int, int]) -> None:
    """Take the payloads of experiences away; their records stay."""
    batch = world.store.batch()
    for member in members:
        record = entry_of(buffer, *member).record
        batch.remove(buffer.id, record)
        batch.put_record(buffer.id, record)
    await world.store.commit(batch)


@pytest.mark.parametrize("name", ["TRXP", "PACKED"])
async def test_too_small_a_rest_is_sampled_anew(world: World, name: str) -> None:
    """A caller that wants 2 or nothing never gets 1; what comes next takes the place."""
    backend, buffer = await serving(world, push((1, 0), (1, 1), (1, 2), (1, 3)))
    await lose(world, buffer, (1, 1), (1, 2))
    form = types_pb2.SampleFormat.Value(f"SAMPLE_FORMAT_{name}")
    response = await called(backend, batch_size=2, min_batch_size=2, format=form)
    lease = buffer.state.leases.find(response.lease.id)
    assert lease is not None
    assert [unit.seqs for unit in lease.units] == [(1,), (4,)]
    assert [unit.num_deliveries for unit in lease.units] == [1, 1]
    assert (response.num_units, response.shortfall) == (2, "")
    assert buffer.stats().num_damaged == 2
    response = await called(backend, batch_size=1)
    assert not response.HasField("lease")
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert (consumer.num_leased, len(consumer.out), consumer.num_leased_experiences) == (2, 2, 2)


async def test_what_was_sent_of_a_batch_is_followed_by_its_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experience_buffer_server.rpc.batch_sender.FRAME_BYTES", 1)
    backend, buffer = await serving(world, push((1, 0), (1, 1), (1, 2)))
    await lose(world, buffer, (1, 2))

    stream = granting(backend, 1, batch_size=3, min_batch_size=3)
    frames = [await frame_of(stream) for _ in range(3)]
    uids = [[one.uid for one in frame.experiences] for frame in frames]
    assert uids == [[uid(1, 0)], [uid(1, 1)], []]
    assert [frame.last for frame in frames] == [False, False, True]
    assert frames[2].num_units == 2
    assert frames[2].shortfall == "1 more was set aside: damaged on the disk"
    lease = buffer.state.leases.find(frames[2].lease.id)
    assert lease is not None
    assert [unit.seqs for unit in lease.units] == [(1,), (2,)]
    await stream.aclose()
    await buffer.drain()


async def test_it_survives_a_restart_and_leaves_by_delete_alone(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)))
    entry = entry_of(buffer, 1, 0)
    buffer.set_aside({entry.record.seq: "its payload is gone"})
    buffer.set_aside({entry.record.seq: "said again"})
    assert [unit.seqs for unit in (await leased(buffer, 2)).units] == [(2,)]
    fresh = await world.restart(buffer)
    entry = entry_of(fresh, 1, 0)
    assert entry.quarantine == entry.damage
    assert entry.damage.startswith("its payload is gone; delete it, or restore")
    assert fresh.stats().num_damaged == 1
    consumer = fresh.state.consumers["trainer"]
    assert (len(consumer.ready), len(consumer.out)) == (0, 1)
    with pytest.raises(errors.DataLossError, match="is damaged: its payload is gone; delete"):
        fresh.check_sound(entry)
    with pytest.raises(errors.WrongStateError, match="can't be offered again: its payload"):
        await fresh.release(consumer.name, [uid(1, 0)])
    (outcome,) = await fresh.annotate([Annotation(uid=uid(1, 0), reward=1.0)])
    assert outcome.reason is AnnotateReason.INVALID
    assert "delete the experience" in outcome.message
    await fresh.delete([entry])
    assert fresh.stats().num_damaged == 0
    assert (await world.restart(fresh)).num_items == 1


async def test_a_leased_one_that_comes_back_is_not_offered_again(world: World) -> None:
    """It was read well once; another consumer has found the damage since. It isn't removed, either."""
    buffer = await world.holding(push((1, 0), (1, 1)))
    lease = await leased(buffer, 1)
    buffer.set_aside({1: "its payload is gone"})
    await buffer.nack(lease.id, reason="again")
    await buffer.drain()
    consumer = buffer.state.consumers["trainer"]
    assert [unit.seqs for unit in (await leased(buffer, 2)).units] == [(2,)]
    assert (len(consumer.ready), buffer.num_items) == (0, 2)


async def test_an_ack_of_one_that_was_delivered_in_time_counts(world: World) -> None:
    buffer = await world.holding(push((1, 0)))
    lease = await leased(buffer, 1)
    buffer.set_aside({1: "its payload is gone"})
    await buffer.ack(lease.id)
    assert buffer.num_items == 0


async def test_a_limiter_counts_what_is_set_aside_no_more(world: World) -> None:
    """Else its samples, which never come, would hold back pushes for ever."""
    limiter = {"samples_per_insert": 1, "min_diff": -16, "max_diff": 16}
    trainer = {"name": "trainer", "limiter": limiter}
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2)), consumers=[trainer])
    consumer = buffer.state.consumers["trainer"]
    before = consumer.counts().inserts
    buffer.set_aside({2: "its payload is gone"})
    assert consumer.counts().inserts == before - 1
    fresh = await world.restart(buffer)
    assert fresh.state.consumers["trainer"].counts().inserts == before - 1


def test_a_unit_that_the_limiter_was_told_to_overlook_stays_so() -> None:
    tally = Tally()
    tally.arrived(1, num_bytes=3, times=1)
    tally.rebase([1])
    before = tally.counts()
    tally.forget(1)
    assert tally.counts() == before


async def test_no_number_is_given_twice(world: World) -> None:
    """Not after the newest was deleted and the server has died, nor a priority's."""
    buffer = await world.holding(push((1, 0), (1, 1), (1, 2)))
    await buffer.delete([entry_of(buffer, 1, 2)])
    fresh = await world.restart(buffer)
    await fresh.push(push((1, 3)))
    assert entry_of(fresh, 1, 3).record.seq == 4
    await fresh.delete([entry_of(fresh, 1, 0)])
    last = await world.restart(fresh)
    await last.delete(list(last.state.contents))
    again = await world.restart(last)
    await again.push(push((1, 5)))
    assert entry_of(again, 1, 5).record.seq == 5


async def test_numbers_are_noted_once_for_many_removals(world: World) -> None:
    """The first removal notes the highest number: those of older ones bring no row of their own."""
    buffer = await world.holding(push(*((1, run) for run in range(5))))
    noted = []
    for run in (0, 1, 4, 3):
        batch = world.store.batch()
        departure.leave(buffer.state, batch, [entry_of(buffer, 1, run)], departure.Cause("deleted"))
        noted.append(sum(kind == Kind.LAST_SEQ for kind, *_ in batch.operations))
        await buffer.push(push((2, run)))
    assert noted == [1, 0, 0, 0]


def test_a_tombstones_reason_is_no_damage() -> None:
    given: dict[str, Any] = dict.fromkeys(Record.__dataclass_fields__, 0)
    for tombstone, damage in ((True, ""), (False, "why")):
        record = Record(**given | {"tombstone": tombstone, "note": "why"})
        assert Entry(record, None).damage == damage
