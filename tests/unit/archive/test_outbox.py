"""What has left waits, whole, until it is written; nothing of it is lost silently."""

from __future__ import annotations

import pytest

from experience_buffer import trxp
from experience_buffer_server.archive.note import Note
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.store.interface import DepartedRow
from tests.unit.archive.conftest import Archive, consume
from tests.unit.builders import World, experience, payload, push, uid


def reasons(archive: Archive, buffer_id: int) -> dict[str, Note]:
    return {
        row.record.uid: Note.decode(row.note)
        for _, row in archive.world.store.departed_rows(buffer_id)
        if isinstance(row, DepartedRow)
    }


async def test_what_is_consumed_waits_with_who_took_it(archive: Archive) -> None:
    buffer = await archive.create()
    await buffer.push(push((1, 0), (1, 1)))
    await consume(buffer, 2, step=7)
    assert len(buffer.state.outbox) == 0  # A rewind may bring it back.
    await buffer.declare_safe("trainer", 7)
    await buffer.drain()
    assert (len(buffer.state.outbox), buffer.num_items) == (2, 0)
    assert buffer.state.outbox.num_bytes == len(payload((1, 0))) + len(payload((1, 1)))
    (first, second) = archive.world.store.departed(buffer.id, [1, 2])
    assert (first.payload, second.payload) == (payload((1, 0)), payload((1, 1)))
    assert first.row.progress is not None
    assert first.row.progress.trained[0][:2] == ["trainer", 7]
    assert reasons(archive, buffer.id)[uid(1, 0)].reason == "consumed"


@pytest.mark.parametrize("keeps", [True, False])
async def test_what_is_deleted_is_archived_only_where_that_was_asked_for(
    archive: Archive, keeps: bool
) -> None:
    buffer = await archive.create(archive={"deleted": keeps})
    await buffer.push(push((1, 0)))
    await buffer.delete(list(buffer.state.contents))
    assert len(buffer.state.outbox) == keeps
    assert list(archive.world.store.payload_uids(buffer.id)) == [uid(1, 0)] * keeps


async def test_without_an_archive_nothing_waits(archive: Archive) -> None:
    buffer = await archive.create(archive=None)
    await buffer.push(push((1, 0)))
    await consume(buffer, 1)
    assert len(buffer.state.outbox) == 0
    assert list(archive.world.store.payload_uids(buffer.id)) == []


async def test_what_is_dropped_says_why(archive: Archive) -> None:
    buffer = await archive.create(group_by="task", group_size=3)
    await buffer.push(push((1, 0), (1, 1)))
    await buffer.drop("2/1", "its environment broke")
    await buffer.drain()
    note = reasons(archive, buffer.id)[uid(1, 1)]
    assert (note.reason, note.message) == ("group_dropped", "its environment broke")


async def test_a_uid_that_waits_is_pushed_again(archive: Archive) -> None:
    """Both are kept: the one that has left, and the new one."""
    buffer = await archive.create(archive={"deleted": True})
    await buffer.push(push((1, 0)))
    await buffer.delete(list(buffer.state.contents))
    await buffer.push(push((1, 0)))
    assert buffer.num_items == 1
    await consume(buffer, 1)
    box = buffer.state.outbox
    assert len(box) == 2
    found = archive.world.store.departed(buffer.id, box.take(9, 1 << 30))
    assert [one.payload for one in found] == [payload((1, 0))] * 2
    await box.written([one.row.record.seq for one in found])
    assert list(archive.world.store.payload_uids(buffer.id)) == []


async def test_beyond_its_bound_the_oldest_leave_and_are_counted(archive: Archive) -> None:
    buffer = await archive.create()
    for run in range(4):
        await buffer.push(push((1, run)))
    await consume(buffer, 4)
    box = buffer.state.outbox
    box.max_pending_bytes = box.num_bytes - 1
    assert await box.shed() == 1
    assert (len(box), box.counts.num_lost) == (3, 1)
    assert uid(1, 0) not in reasons(archive, buffer.id)
    assert await box.shed() == 0
    box.take(1, 1 << 30)
    assert await box.shed(everything=True) == 2  # One is being written.
    assert box.counts.num_lost == 3


@pytest.mark.on_disk
async def test_a_restart_finds_what_waited(archive: Archive, world: World) -> None:
    buffer = await archive.create(archive={"deleted": True})
    await buffer.push(push((1, 0), (1, 1)))
    first = next(iter(buffer.state.contents))
    await buffer.delete([first])
    await buffer.push(push((1, 0)))
    await consume(buffer, 1)
    again = await world.restart(buffer)
    assert len(again.state.outbox) == 2
    assert again.num_items == 1
    assert again.state.outbox.num_bytes == buffer.state.outbox.num_bytes
    assert again.state.outbox.waits(uid(1, 0)) is None
    assert again.state.outbox.waits(uid(1, 1)) == 2
    assert await again.state.outbox.shed() == 0


async def test_what_is_refused_is_kept_as_far_as_there_is_room(archive: Archive) -> None:
    buffer = await archive.create(advantage="reinforce")
    good, bad = experience(1, 0), experience(1, 1, reward=None)
    frame = trxp.encode([good, bad])
    outcomes = await buffer.push(Push(payloads=[frame]))
    assert [outcome.status.value for outcome in outcomes] == ["stored", "refused"]
    (kept,) = buffer.state.outbox.refused
    assert (kept.uid, kept.payload, kept.place) == (uid(1, 1), frame, 1)
    await archive.write(buffer)
    found = archive.lookup(buffer).get(uid(1, 1))
    assert found is not None
    assert found["payload"] == trxp.encode([bad])
    assert "reward" in found["departure_message"]
    for _ in range(300):
        await buffer.push(Push(payloads=[trxp.encode([bad])]))
    assert len(buffer.state.outbox.refused) == 256
    assert buffer.state.outbox.counts.num_refused_lost == 44
