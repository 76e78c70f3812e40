"""What leaves a buffer by itself, by age and by version, and what must not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.intake.annotation import Annotation
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.leaving import retention as module
from experience_buffer_server.buffer.settings_checks import checked_settings
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.runtime import clock as steady_clock
from experience_buffer_server.runtime.tuning import TUNING
from tests.models.model import Lease, Member, Model
from tests.refusing_store import Held
from tests.unit.buffer.leaving.test_group_closing import full_disk
from tests.unit.buffer_verbs import change, dropped, leased, of_version, sampled, stored
from tests.unit.builders import World, begun, experience, push, settings, settle, uid, want

HOUR = 3600.0


class Clock:
    """The clock of the server, which a test moves."""

    now = 0.0


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.now = 1_700_000_000.0
    monkeypatch.setattr(steady_clock, "now", lambda: CLOCK.now)


async def pass_by(buffer: Buffer, seconds: float = 0.0) -> None:
    """Time passes, and two ticks: what the first finds held by a commit, the next finds free."""
    CLOCK.now += seconds
    await settle(buffer, after=0)
    CLOCK.now += 1.0
    await settle(buffer, after=0)


async def push_at(buffer: Buffer, task: int, run: int, version: int | None = None) -> None:
    (outcome,) = await buffer.push(of_version(version, (task, run)))
    assert outcome.status == "stored"


async def sample(buffer: Buffer, count: int, consumer: str = "trainer") -> int:
    return (await leased(buffer, count, consumer, lease_seconds=1e6)).id


async def test_what_is_older_leaves_and_is_remembered(world: World) -> None:
    buffer = await world.create(group_by="none", retention={"max_age_seconds": HOUR})
    await buffer.push(push((1, 0), (1, 1)))
    CLOCK.now += HOUR / 2
    await buffer.push(push((2, 0)))
    CLOCK.now += HOUR / 2
    await settle(buffer, after=0)
    assert len(stored(buffer)) == 3, "the bound itself is not too old"
    await pass_by(buffer, 1.0)
    assert stored(buffer) == [(2, 0)]
    assert dropped(world, buffer, "aged") == 2
    (again,) = await buffer.push(push((1, 1)))
    assert again.status == "duplicate"
    fresh = await world.restart(buffer)
    await pass_by(fresh, HOUR)
    assert stored(fresh) == []


async def test_what_is_further_behind_leaves(world: World) -> None:
    buffer = await world.create(group_by="none", retention={"max_lag": 2})
    for version in (5, 3, 4, 3):
        await push_at(buffer, version, len(buffer.state.contents), version)
    await buffer.push(push((9, 9)))
    await pass_by(buffer)
    assert len(stored(buffer)) == 5, "nothing is published yet"
    buffer.row.policy_version = 6
    await pass_by(buffer)
    assert stored(buffer) == [(5, 0), (4, 2), (9, 9)]
    assert dropped(world, buffer, "outdated") == 2
    buffer.row.policy_version = 4
    await push_at(buffer, 1, 1, 1)
    await pass_by(buffer)
    assert stored(buffer) == [(5, 0), (4, 2), (9, 9)]
    fresh = await world.restart(buffer)
    fresh.row.policy_version = 1000
    await pass_by(fresh)
    assert stored(fresh) == [(9, 9)], "of an unknown version"


async def test_groups_leave_whole_and_open_ones_by_age_alone(world: World) -> None:
    limits = {"max_age_seconds": HOUR, "max_lag": 2}
    buffer = await world.create(
        group_size=2, retention=limits, consumers=[{"name": "trainer", "unit": "group"}]
    )
    await push_at(buffer, 1, 0, 1)
    await push_at(buffer, 2, 0, 9)
    await push_at(buffer, 2, 1, 1)
    await push_at(buffer, 3, 0, 9)
    buffer.row.policy_version = 9
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0), (3, 0)], "the lowest version counts; 1 is open"
    CLOCK.now += HOUR - 10
    await push_at(buffer, 3, 1, 9)
    await push_at(buffer, 4, 0, 9)
    await pass_by(buffer, 20)
    assert stored(buffer) == [(4, 0)], "the oldest member counts"
    assert (dropped(world, buffer, "aged"), dropped(world, buffer, "outdated")) == (3, 2)
    for task in (1, 3):
        (late,) = await buffer.push(push((task, 7)))
        assert late.reason == "late", "the group was dropped as a whole"


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_open_group_that_was_consumed_leaves_by_age(world: World, restarts: bool) -> None:
    """A rollout that died leaves "2 of 3" behind, which no experience tells of any more."""
    buffer = await world.create(
        group_size=3,
        retention={"max_age_seconds": HOUR},
        consumers=[{"name": "trainer", "unit": "item"}],
    )
    await buffer.push(push((1, 0), (1, 1), (2, 0), (2, 1), (3, 0)))
    await buffer.ack(await sample(buffer, 5))
    await buffer.drain()
    if restarts:
        buffer = await world.restart(buffer)
    CLOCK.now += HOUR / 2
    await buffer.push(push((2, 2)))
    await pass_by(buffer)
    assert [group.describe() for group in buffer.state.contents.groups] == [
        "2 of 3",
        "3 of 3",
        "1 of 3",
    ]
    await buffer.push(push((3, 1)))
    await pass_by(buffer, HOUR / 2 + 1)
    assert [group.row.key for group in buffer.state.contents.groups] == ["2/2", "2/3"], (
        "3 has a young one"
    )
    (late,) = await buffer.push(push((1, 2)))
    assert late.reason == "late", "it was dropped"
    await buffer.ack(await sample(buffer, 2))
    await pass_by(buffer)
    assert not list(buffer.state.contents.groups)
    fresh = await world.restart(buffer)
    assert not list(fresh.state.contents.groups)


async def test_an_open_group_that_is_outdated_leaves_once_it_is_whole(world: World) -> None:
    buffer = await world.create(group_size=2, retention={"max_lag": 2})
    await push_at(buffer, 1, 0, 1)
    buffer.row.policy_version = 9
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0)]
    await push_at(buffer, 1, 1, 9)
    await pass_by(buffer)
    assert stored(buffer) == []


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_a_leased_unit_leaves_when_it_comes_back(world: World, group_by: str) -> None:
    buffer = await world.holding(
        push((1, 0), (2, 0)), group_by=group_by, group_size=1, retention={"max_age_seconds": HOUR}
    )
    lease_id = await sample(buffer, 2)
    await pass_by(buffer, HOUR + 1)
    assert stored(buffer) == [(1, 0), (2, 0)]
    waiting = await begun(
        buffer.sample("trainer", want(1, timeout_seconds=60.0), stop := asyncio.Event())
    )
    await buffer.nack(lease_id, reason="test")
    await buffer.drain()
    assert stored(buffer) == [], "before anybody gets it again, and without a tick"
    assert not waiting.done()
    stop.set()
    await waiting
    assert dropped(world, buffer, "aged") == 2


async def test_what_a_rewind_may_need_stays(world: World) -> None:
    buffer = await world.create(group_by="none", retention={"max_age_seconds": HOUR})
    await buffer.push(push((1, 0), (2, 0), (3, 0)))
    for step in (1, 2):
        await buffer.ack(await sample(buffer, 1), step=step)
    await pass_by(buffer, HOUR + 1)
    assert stored(buffer) == [(1, 0), (2, 0)]
    trainer = buffer.state.consumer("trainer")
    await buffer.flow.timelines.rewind(trainer, 1)
    buffer = await world.restart(buffer)
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0), (2, 0)], "the trainer is to get 2 again"
    await buffer.ack(await sample(buffer, 1), step=5)
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0), (2, 0)]
    await buffer.declare_safe("trainer", 5)
    assert stored(buffer) == []


async def test_what_others_would_want_leaves_once_no_rewind_does(world: World) -> None:
    consumers = [{"name": "trainer"}, {"name": "critic"}]
    buffer = await world.holding(
        push((1, 0)), group_by="none", consumers=consumers, retention={"max_age_seconds": HOUR}
    )
    await buffer.ack(await sample(buffer, 1), step=1)
    await pass_by(buffer, HOUR + 1)
    assert stored(buffer) == [(1, 0)]
    await buffer.declare_safe("trainer", 1)
    await pass_by(buffer)
    assert stored(buffer) == []
    assert dropped(world, buffer, "aged") == 1, "the critic never had it"


async def test_settings_hold_at_once_and_can_be_taken_back(world: World) -> None:
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none")
    lease_id = await sample(buffer, 1)
    CLOCK.now += HOUR
    changing = buffer.change_settings(
        checked_settings(buffer.settings.model_dump() | {"retention": {"max_age_seconds": 60.0}})
    )
    buffer.tick(CLOCK.now)
    assert not any(entry.leaving for entry in buffer.state.contents), "not before it is on disk"
    await changing
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0)]
    await change(buffer, retention=None)
    await buffer.nack(lease_id, reason="test")
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0)]
    assert await sample(buffer, 1)


@pytest.mark.on_disk
async def test_a_removal_that_found_no_room_is_tried_again(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_by="none", retention={"max_age_seconds": HOUR})
    CLOCK.now += HOUR + 1
    with full_disk(world):
        await pass_by(buffer)
        assert stored(buffer) == [(1, 0)]
        assert dropped(world, buffer, "aged") == 0
    await pass_by(buffer)
    assert stored(buffer) == []
    assert dropped(world, buffer, "aged") == 1


async def test_what_could_not_leave_follows_the_settings_that_came_meanwhile(world: World) -> None:
    """Its field isn't asked for any more: else it would wait for it for ever."""
    waits: dict[str, Any] = {"advantage": {"estimator": "gae"}, "on_missing_field": "wait"}
    buffer = await world.create(group_by="none", retention={"max_age_seconds": HOUR}, **waits)
    await buffer.push(push((1, 0)))
    (entry,) = buffer.state.contents
    assert entry.missing
    CLOCK.now += HOUR + 1
    removal = Held(world.store)
    buffer.tick(CLOCK.now)
    assert entry.leaving
    await buffer.change_settings(settings(group_by="none"))
    removal.refuse()
    await buffer.drain()
    assert not entry.leaving
    assert entry.available


async def test_a_tick_does_a_bounded_part_and_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNING, "aged_looks_per_tick", 7)
    buffer = await world.create(group_by="none", retention={"max_age_seconds": HOUR})
    await buffer.push(push(*((1, run) for run in range(20))))
    lease_id = await sample(buffer, 10)
    CLOCK.now += HOUR + 1
    left = []
    for _ in range(4):
        await settle(buffer, after=0)
        left.append(len(buffer.state.contents))
    assert left == [20, 16, 10, 10]
    await buffer.ack(lease_id)
    assert stored(buffer) == []


async def test_only_the_due_are_looked_at(world: World) -> None:
    buffer = await world.create(group_by="none", retention={"max_age_seconds": HOUR, "max_lag": 3})
    await buffer.push(push(*((1, run) for run in range(90))))
    buffer.tick(CLOCK.now)
    looked: list[int] = []
    contents = buffer.state.contents
    plain: Callable[[int], Any] = contents.since

    def counting(seq: int) -> Any:
        for entry in plain(seq):
            looked.append(entry.record.seq)
            yield entry

    contents.since = counting  # type: ignore[method-assign]
    for _ in range(10):
        buffer.tick(CLOCK.now)
    assert len(looked) == 10, "one each: it isn't old enough"


async def test_the_index_of_versions_does_not_grow_with_what_has_left(world: World) -> None:
    buffer = await world.create(group_by="none")
    for task in range(3):
        payload = trxp.encode(
            [experience(task, run, info={"model_version": task}) for run in range(90)]
        )
        await buffer.push(Push(payloads=[payload]))
        lease_id = await sample(buffer, 90)
        assert len(buffer.state.contents.versions) == 90
        await buffer.ack(lease_id)
    assert len(buffer.state.contents.versions) == 0


@pytest.mark.parametrize("group_by", ["none", "task"])
async def test_an_annotated_version_counts(world: World, group_by: str) -> None:
    buffer = await world.create(group_by=group_by, group_size=2, retention={"max_lag": 2})
    for run in range(2):
        await push_at(buffer, 1, run)
        await push_at(buffer, 2, run, 5)
    buffer.row.policy_version = 5
    await buffer.annotate(
        [
            Annotation(uid=uid(1, 1), info={"model_version": 1}),
            Annotation(uid=uid(2, 0), info={"model_version": 9}),
        ]
    )
    await pass_by(buffer)
    assert stored(buffer) == ([(1, 0)] if group_by == "none" else []) + [(2, 0), (2, 1)]
    buffer.row.policy_version = 8
    await pass_by(buffer)
    assert stored(buffer) == ([(1, 0), (2, 0)] if group_by == "none" else [])


async def test_what_is_held_is_looked_at_about_once_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await world.create(group_size=3, retention={"max_age_seconds": HOUR})
    members = [(task, run) for task in range(30) for run in range(3)]
    await buffer.push(push(*members))
    await buffer.ack(await sample(buffer, 90), step=1)
    looked: list[Entry] = []
    is_idle = buffer.state.is_idle

    def counting(entry: Entry) -> bool:
        looked.append(entry)
        return is_idle(entry)

    def judging(*_: Any, **__: Any) -> None:
        pytest.fail("judged before it could leave")

    monkeypatch.setattr(buffer.state, "is_idle", counting)
    monkeypatch.setattr(module, "why_stale", judging)
    CLOCK.now += HOUR + 1
    for _ in range(9):
        buffer.flow.retention.tick(CLOCK.now)
        CLOCK.now += 0.25
    assert len(looked) == 3 * 30, "the first member of each, at once and each second"
    monkeypatch.setattr(TUNING, "parked_looks_per_tick", 4)
    CLOCK.now += 1.0
    buffer.flow.retention.tick(CLOCK.now)
    assert len(looked) == 3 * 30 + 4
    monkeypatch.setattr(TUNING, "members_per_tick", 5)
    CLOCK.now += 1.0
    buffer.flow.retention.tick(CLOCK.now)
    assert len(looked) == 3 * 30 + 6


async def test_open_groups_count_for_what_a_tick_lets_leave(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNING, "leaving_per_tick", 3)
    buffer = await world.create(group_size=5, retention={"max_age_seconds": HOUR})
    await buffer.push(push(*((task, run) for task in range(6) for run in range(2))))
    CLOCK.now += HOUR + 1
    left = []
    for _ in range(3):
        await settle(buffer, after=0)
        left.append(len(buffer.state.contents))
    assert left == [8, 4, 0]


async def test_what_was_withheld_is_offered_when_it_is_not_due_any_more(world: World) -> None:
    """Nobody gets what is due, also while another consumer keeps it from leaving."""
    consumers = [{"name": "trainer"}, {"name": "critic"}]
    buffer = await world.create(group_by="none", consumers=consumers, retention={"max_lag": 2})
    await push_at(buffer, 1, 0, 1)
    lease_id = await sample(buffer, 1)
    await sample(buffer, 1, "critic")
    buffer.row.policy_version = 9
    await buffer.nack(lease_id, reason="test")
    await pass_by(buffer)
    trainer = buffer.state.consumer("trainer")
    assert not len(trainer.ready), "it is due, and with the critic"
    buffer.row.policy_version = 2
    await pass_by(buffer)
    assert len(trainer.ready) == 1
    buffer.row.policy_version = 9
    await pass_by(buffer)
    assert stored(buffer) == [(1, 0)]
    await change(buffer, retention=None)
    assert await sample(buffer, 1)


@pytest.mark.parametrize("order", ["acked first", "returned first"])
async def test_what_returns_and_is_kept_for_a_rewind_is_offered(world: World, order: str) -> None:
    """It stays until the rewind is out of reach: a restart would offer it meanwhile."""
    consumers = [{"name": "trainer"}, {"name": "critic"}]
    buffer = await world.holding(
        push((1, 0), (1, 1)), group_size=2, consumers=consumers, retention={"max_age_seconds": HOUR}
    )
    returned, acked = await sample(buffer, 1), await sample(buffer, 1, "critic")
    await sample(buffer, 1)
    await pass_by(buffer, HOUR + 1)

    async def give_back() -> None:
        await buffer.nack(returned, reason="test")

    async def ack() -> None:
        await buffer.ack(acked, step=1)

    for work in (ack, give_back) if order == "acked first" else (give_back, ack):
        await work()
        await buffer.drain()
    for now in (buffer, await world.restart(buffer)):
        ready = now.state.consumer("trainer").ready
        assert [entry.record.seq in ready for entry in now.state.contents] == [True, False]


VERBS = ("push", "push", "push", "lend", "lend", "ack", "ack at a step", "nack")
TIMES = ("go back", "go on", "publish", "wait")


@pytest.mark.parametrize("seed", range(8))
async def test_as_the_model_says(world: World, seed: int) -> None:
    """Random pushes, leases, acks, rewinds, versions and clocks, against the model of a buffer."""
    chance = random.Random(seed)
    max_age, max_lag = 100.0, 3
    buffer = await world.create(
        group_by="none", retention={"max_age_seconds": max_age, "max_lag": max_lag}
    )
    trainer, model = buffer.state.consumer("trainer"), Model({"trainer": {"unit": "item"}})
    pushed: dict[str, tuple[float, int | None]] = {}
    published, step = 2, 0

    def is_due(member: Member) -> bool:
        push_time, version = pushed[member.uid]
        lag = 0 if version is None else published - version
        return CLOCK.now - push_time > max_age or lag > max_lag

    def is_free(member: Member) -> bool:
        return not (model.is_held(member) or model.may_return(member) or model.was_rewound(member))

    for _ in range(80):
        lease_id = chance.choice(list(model.leases)) if model.leases else 0
        match chance.choice((*VERBS, *TIMES)):
            case "push":
                run, version = len(pushed), chance.choice((None, published, 2))
                await push_at(buffer, 1, run, version)
                model.push(f"2/{run}", uid(1, run), dead=False, version=0)
                pushed[uid(1, run)] = (CLOCK.now, version)
            case "lend":
                lease, _ = await sampled(buffer, chance.randint(1, 3), lease_seconds=1e6)
                if lease is not None:
                    entries = buffer.entries(seq for unit in lease.units for seq in unit.seqs)
                    uids = [entry.record.uid for entry in entries]
                    model.leases[lease.id] = Lease("trainer", uids, lease.deadline, [])
            case "ack" if lease_id:
                await buffer.ack(lease_id)
                model.ack(lease_id, None)
            case "ack at a step" if lease_id:
                step += 1
                await buffer.ack(lease_id, step=step)
                model.ack(lease_id, step)
            case "nack" if lease_id:
                await buffer.nack(lease_id, reason="test")
                model.end(lease_id, blamed=False)
            case "go back":
                step = chance.randint(trainer.timeline.safe_step or 0, step) if step else 0
                await buffer.rewind("trainer", step)
                model.rewind("trainer", step)
            case "go on":
                safe = chance.randint(0, step)
                await buffer.declare_safe("trainer", safe)
                model.declare_safe("trainer", safe)
            case "publish":
                published = max(0, published + chance.choice((1, 1, 2, -1)))
                await buffer.publish(published)
            case "wait":
                CLOCK.now += chance.choice((1.0, 20.0, 60.0))
        await pass_by(buffer)
        model.leave([m for m in model.members().values() if is_due(m) and is_free(m)], "dropped")
        assert {entry.record.uid for entry in buffer.state.contents} == model.members().keys()
    offered = [*trainer.ready, *trainer.held]
    assert {entry.record.uid for entry in buffer.entries(offered)} == model.available(
        "trainer"
    ).keys(), "what stays is offered"
