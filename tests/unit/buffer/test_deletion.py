"""Deleted buffers: large ones go in parts, nothing halfway; and what they held is let go of at once."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable

import pytest

from experience_buffer import errors
from experience_buffer.errors import LeaseNotFoundError
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.runtime.memory import sweep
from experience_buffer_server.runtime.tuning import TUNING
from experience_buffer_server.store.interface import ProgressRow, StoreFullError, WriteBatch
from experience_buffer_server.store.lmdb.snapshots.inventory import checked_inventory, problem_of
from experience_buffer_server.store.lmdb.verify.check import check
from tests.refusing_store import Held, Refusals, begin
from tests.scenarios.test_coming_and_going import restarted
from tests.unit.buffer_verbs import leased, push_and_settle, take
from tests.unit.builders import World, begun, push, settings, until

NUM_TASKS, NUM_RUNS = 5, 2


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TUNING, "dropped_at_once", 3)


@pytest.fixture
async def registry(world: World) -> Registry:
    """With a buffer "old" that has groups, leases, remembered values, and one "new"."""
    registry = world.registry()
    for name in ("old", "new"):
        buffer = await registry.create(name, settings(group_size=NUM_RUNS))
        for task in range(NUM_TASKS):
            await buffer.push(push(*((task, run) for run in range(NUM_RUNS))))
    return registry


class Commits:
    """Stops a world's store after some commits, as a crash does."""

    def __init__(self, world: World, most: int) -> None:
        self.num = 0
        self._most = most
        self._commit = world.store.commit
        vars(world.store)["commit"] = self.commit

    def commit(self, batch: WriteBatch) -> Awaitable[None]:
        self.num += 1
        if self.num <= self._most:
            return self._commit(batch)
        return asyncio.get_running_loop().create_future()


def left(world: World) -> dict[str, int]:
    """By name of the buffer, experiences on the disk."""
    states = list(world.store.load())
    return {s.row.name: len(s.records) for s in states if s.row.name != "default"}


def names(registry: Registry) -> list[str]:
    return [buffer.name for buffer in registry.all() if buffer.name != "default"]


async def deleted_on_disk(
    world: World, registry: Registry
) -> tuple[asyncio.Future[int], Refusals, asyncio.Event]:
    """A deletion that is certain on the disk, and hears of it once the event is set."""
    refusals = Refusals(world.store)
    held = refusals.held = asyncio.Event()
    deleting = asyncio.ensure_future(registry.delete("old", force=True))
    await until(lambda: "" in left(world))
    return deleting, refusals, held


async def test_others_commit_between_the_parts(world: World, registry: Registry) -> None:
    deleting = asyncio.ensure_future(registry.delete("old", force=True))
    new, num_pushed = registry.get("new"), 0
    while not deleting.done():
        await new.push(push((100 + num_pushed, 0)))
        num_pushed += 1
    assert await deleting == NUM_TASKS * NUM_RUNS
    assert num_pushed >= 4
    assert left(world) == {"new": NUM_TASKS * NUM_RUNS + num_pushed}
    assert list(world.store.payload_uids(1)) == []


@pytest.mark.on_disk
@pytest.mark.parametrize("num_commits", range(1, 9))
async def test_a_crash_on_the_way_leaves_what_fits_together(
    world: World, registry: Registry, num_commits: int
) -> None:
    commits = Commits(world, num_commits)
    deleting = asyncio.ensure_future(registry.delete("old", force=True))
    await until(lambda: commits.num > num_commits or deleting.done())
    deleting.cancel()
    await world.store.close()
    assert problem_of(check(world.path)) == ""
    (inventory,), warnings = checked_inventory(world.path)
    assert (inventory.name, warnings) == ("new", [])
    await world.open()
    again = world.registry()
    await again.load()
    assert names(again) == ["new"]
    await until(lambda: "" not in left(world))
    assert left(world) == {"new": NUM_TASKS * NUM_RUNS}
    fresh = await again.create("old", settings())
    assert (fresh.id > 2, fresh.num_items) == (True, 0)
    await again.drain()


async def test_a_crash_before_all_leaves_the_buffer(world: World, registry: Registry) -> None:
    Commits(world, 0)
    asyncio.ensure_future(registry.delete("old", force=True)).cancel()
    again = await restarted(world)
    assert again.get("old").num_items == NUM_TASKS * NUM_RUNS


async def test_what_is_refused_midway_is_deleted_later(world: World, registry: Registry) -> None:
    deleting, refusals, held = await deleted_on_disk(world, registry)
    refusals.num_next = 1
    held.set()
    with pytest.raises(StoreFullError):
        await deleting
    assert await registry.delete("old", force=True) == NUM_TASKS * NUM_RUNS
    assert left(world) == {"new": NUM_TASKS * NUM_RUNS}


async def test_a_server_that_stops_goes_on_at_its_next_start(
    world: World, registry: Registry
) -> None:
    deleting, _, held = await deleted_on_disk(world, registry)
    draining = await begun(registry.drain())
    held.set()
    with pytest.raises(errors.UnavailableError, match="goes when it starts again"):
        await deleting
    await draining
    assert left(world)[""] > 0
    again = await restarted(world)
    await until(lambda: "" not in left(world))
    assert names(again) == ["new"]


async def test_remembered_values_go_in_parts_too(world: World, registry: Registry) -> None:
    buffer = registry.get("old")
    uids = [f"gone/{number}" for number in range(8)]
    batch = world.store.batch()
    for number, uid in enumerate(uids):
        batch.remember(buffer.id, "uid", uid, b"digest", float(number))
    await world.store.commit(batch)
    commits = Commits(world, 100)
    await registry.delete("old", force=True)
    assert world.store.recall(buffer.id, "uid", uids) == [None] * len(uids)
    # That it goes, its experiences, its groups, all else: what is remembered had its own.
    assert commits.num == 1 + 4 + 2 + 1


async def test_a_deleted_buffers_id_is_never_given_again(world: World, registry: Registry) -> None:
    newest = registry.get("new").id
    assert newest == max(buffer.id for buffer in registry.all())
    await registry.delete("new", force=True)
    again = await restarted(world)
    await again.create("newer", settings())
    assert newest not in {buffer.id for buffer in again.all()}


def _num_objects() -> Counter[type]:
    return Counter(
        type(one) for one in gc.get_objects() if type(one) in (Entry, Group, ProgressRow)
    )


async def test_its_leases_mean_nothing_to_the_next_of_its_name(world: World) -> None:
    registry = world.registry()
    lives = []
    for life in range(2):
        buffer = await registry.create("b", settings(), exist_ok=False)
        await buffer.push(push((life, 0), (life, 1)))
        lives.append(await take(buffer, 2))
        if not life:
            await registry.delete("b", force=True)
    assert lives[0] < lives[1] < 2**53
    with pytest.raises(LeaseNotFoundError):
        await buffer.ack(lives[0])
    await buffer.ack(lives[1])
    assert len(buffer.state.contents) == 0


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_its_experiences_are_freed(world: World, group_by: str) -> None:
    registry = world.registry()
    consumers = ({"name": "trainer"}, {"name": "critic"})
    chosen = settings(group_by=group_by, group_size=2, consumers=consumers)
    gc.collect()
    before = _num_objects()
    gc.disable()
    try:
        buffer = await registry.create("b", chosen, exist_ok=False)
        await push_and_settle(buffer, push((0, 0), (0, 1), (1, 0)))
        lease = await leased(buffer, 2)
        await buffer.ack(lease.id, step=3)
        assert (_num_objects() - before)[Entry] == 3
        del buffer, lease
        assert await registry.delete("b", force=True) == 3
        assert _num_objects() - before == Counter()
    finally:
        gc.enable()


async def test_what_old_ones_were_made_of_is_collected(world: World) -> None:
    """Rooms hold each other, and the calm collector doesn't look where old objects are."""
    registry = world.registry()
    before = sum(type(one) is Buffer for one in gc.get_objects())
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        for number in range(5):
            await registry.create(f"b-{number}", settings(), exist_ok=False)
            # Twice survived: old.
            gc.collect(0)
            gc.collect(1)
            await registry.delete(f"b-{number}", force=False)
        # The last one is still in the hands of who deletes it.
        assert sum(type(one) is Buffer for one in gc.get_objects()) - before <= 1
    finally:
        gc.set_threshold(*threshold)


def test_a_large_store_isnt_looked_through_for_one_buffer() -> None:
    assert sweep(num_leftovers=1, num_entries=5_000)
    assert not sweep(num_leftovers=1, num_entries=5_001)
    assert not sweep(num_leftovers=199, num_entries=1_000_000)
    assert sweep(num_leftovers=200, num_entries=1_000_000)


async def test_what_finds_no_room_is_not_put_right_once_the_buffer_was_deleted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that is stored after the buffer's removal would bring the buffer back."""
    buffer = await world.create()
    held = Held(world.store)
    publishing = await begin(buffer.publish(3))
    buffer.close()
    Refusals(world.store).num_next = 1
    held.refuse()
    with pytest.raises(StoreFullError):
        await publishing
    await buffer.drain()
    assert not caplog.records, "nothing was tried"
