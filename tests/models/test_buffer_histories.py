"""Random histories of one buffer against the model: nothing lost, nothing twice, groups whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.settings.buffer import BufferSettings
from tests.models.buffer_model import SIZE, Model
from tests.unit.builders import World, eid, push, uid, want

T = TypeVar("T")
TASKS = st.integers(0, 3)
MEMBERS = st.lists(st.tuples(TASKS, st.integers(0, 4), st.booleans()), min_size=1, max_size=5)
CONSUMERS = {"actor": "item", "critic": "group"}


class Histories(RuleBasedStateMachine):
    """One buffer, its model, and everything that may happen to both."""

    world: ClassVar[World]
    loop: ClassVar[asyncio.AbstractEventLoop]
    estimator: ClassVar[str] = ""
    num_buffers: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_buffers += 1
        self.model = Model(bool(self.estimator), dict(CONSUMERS))
        self.config: dict[str, Any] = {
            "group_size": SIZE,
            "group_deadline_seconds": 500,
            "on_group_deadline": "use_partial",
            "consumers": [{"name": n, "unit": u} for n, u in CONSUMERS.items()],
            "advantage": {"estimator": self.estimator},
        }
        self.buffer = self.run(self.world.create(self.num_buffers, **self.config))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def settle(self) -> None:
        """Wait for commits, and for computations and their commits."""
        deadline = time.monotonic() + 30
        while True:
            await self.buffer.drain()
            if not self.buffer.computing.num_jobs:
                return
            assert time.monotonic() < deadline, "a computation never ended"
            await asyncio.sleep(0)

    def teardown(self) -> None:
        self.run(self.settle())

    @rule(first=MEMBERS, second=MEMBERS)
    def push_twice_at_once(
        self, first: list[tuple[int, int, bool]], second: list[tuple[int, int, bool]]
    ) -> None:
        expected: list[list[str]] = []
        pushes = []
        for members in (first, second):
            live = [(task, run) for task, run, dead in members if not dead]
            dead = [(task, run) for task, run, dead in members if dead]
            outcomes = [
                self.model.push(f"2/{task}", uid(task, run), dead=kind)
                for kind, some in ((False, live), (True, dead))
                for task, run in some
            ]
            expected.append(outcomes)
            pushes.append(self.buffer.ingest.push(push(*live, dead=dead)))

        async def both() -> list[list[str]]:
            return [[o.status.value for o in found] for found in await asyncio.gather(*pushes)]

        assert self.run(both()) == expected

    @rule(task=TASKS)
    def seal(self, task: int) -> None:
        group = self.model.groups.get(f"2/{task}")
        work = self.buffer.grouping.seal(f"2/{task}", 0)
        if group is None:
            with pytest.raises(errors.GroupNotFoundError):
                self.run(work)
        elif group.closed == "dropped":
            with pytest.raises(errors.WrongStateError):
                self.run(work)
        else:
            self.run(work)
            if not group.closed:
                self.model.close(group, "sealed")

    @rule(task=TASKS)
    def drop(self, task: int) -> None:
        group = self.model.groups.get(f"2/{task}")
        num_dropped = self.run(self.buffer.grouping.drop(f"2/{task}", "aborted"))
        if group is None:
            assert num_dropped == 0
            self.model.past_groups[f"2/{task}"] = "dropped"
        else:
            assert num_dropped == sum(not m.dead for m in group.members)
            self.model.close(group, "dropped")

    @rule(consumer=st.sampled_from(sorted(CONSUMERS)), count=st.integers(1, 3))
    def sample(self, consumer: str, count: int) -> None:
        self.run(self.settle())
        if consumer not in self.model.consumers:
            return
        expected = self.model.ready(consumer)[:count]
        lease, why = self.run(self.buffer.desk.sample(consumer, want(count), asyncio.Event()))
        assert bool(why) == (len(expected) < count)
        assert (lease is None) == (not expected)
        if lease is not None:
            assert [unit.seqs for unit in lease.units] == expected
            self.model.leases[lease.id] = (consumer, expected)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), ack=st.booleans())
    def end_lease(self, data: st.DataObject, ack: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        _, units = self.model.leases[lease_id]
        leasing, num_experiences = self.buffer.leasing, sum(map(len, units))
        if ack:
            assert self.run(leasing.ack(lease_id)).num_experiences == num_experiences
        else:
            assert self.run(leasing.nack(lease_id, reason="x")) == num_experiences
        self.model.end(lease_id, "acked" if ack else "nacked")

    @precondition(lambda self: self.model.ended)
    @rule(data=st.data())
    def ack_again(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.ended)))
        if self.model.ended[lease_id] == "acked":
            self.run(self.buffer.desk.ack(lease_id))
        else:
            with pytest.raises(errors.LeaseNotFoundError):
                self.run(self.buffer.desk.ack(lease_id))

    @rule()
    def let_time_pass(self) -> None:
        self.run(self._tick(time.time() + 1000))
        for lease_id in sorted(self.model.leases):
            self.model.end(lease_id, "expired")
        for group in list(self.model.groups.values()):
            if not group.closed:
                num_votes = sum(not m.dead for m in group.members) + group.num_consumed
                self.model.close(group, "deadline" if num_votes else "dropped")

    async def _tick(self, now: float) -> None:
        self.buffer.tick(now)
        await self.buffer.drain()

    @rule(task=TASKS, run=st.integers(0, 4))
    def delete(self, task: int, run: int) -> None:
        self.run(self.settle())
        entry = self.buffer.contents.by_uid(uid(task, run))
        found = [m for m in self.model.members() if m.uid == uid(task, run)]
        assert bool(found) == (entry is not None)
        if entry is None:
            return
        held = self.model.is_leased(found[0])
        assert self.buffer.removal.is_leased(entry) == held
        if not held:
            self.run(self.buffer.removal.delete([entry]))
            group = self.model.groups[f"2/{task}"]
            self.model.leave(group, found, remember=False)
            self.model.settle(group, remember=False)

    @rule(present=st.booleans())
    def change_consumers(self, present: bool) -> None:
        names = sorted(CONSUMERS) if present else ["actor"]
        for lease_id, (consumer, _) in sorted(self.model.leases.items()):
            if consumer not in names:
                self.model.end(lease_id, "nacked")
        self.model.consumers = {name: CONSUMERS[name] for name in names}
        for group in list(self.model.groups.values()):
            self.model.retire(group)
        self.config["consumers"] = [{"name": name, "unit": CONSUMERS[name]} for name in names]
        self.run(self._change())

    async def _change(self) -> None:
        settings = BufferSettings.model_validate(self.config)
        self.buffer.row.config = settings.model_dump_json()
        batch = self.world.store.batch()
        batch.put_buffer(self.buffer.row)
        await self.world.store.commit(batch)
        self.buffer.change_settings(settings)

    @rule()
    def restart(self) -> None:
        # Numbers go on where they were, also where the last that was given has left.
        self.buffer = self.run(self._reload())

    async def _reload(self) -> Buffer:
        return self.world.reload(self.buffer)

    @invariant()
    def is_as_the_model_says(self) -> None:
        self.run(self.settle())
        members = self.model.members()
        contents = self.buffer.contents
        assert {e.record.uid: e.record.seq for e in contents} == {m.uid: m.seq for m in members}
        assert contents.num_items == sum(not m.dead for m in members)
        assert contents.num_bytes == sum(e.record.payload_bytes for e in contents)
        assert {g.row.key: g.row.closed for g in contents.groups} == {
            group.key: group.closed for group in self.model.groups.values()
        }
        assert set(self.buffer.delivery.consumers) == set(self.model.consumers)
        for name, consumer in self.buffer.delivery.consumers.items():
            held = {i: units for i, (who, units) in self.model.leases.items() if who == name}
            assert len(consumer.ready) == len(self.model.ready(name))
            assert set(consumer.leases) == set(held)
            assert consumer.num_leased == sum(map(len, held.values()))
            assert consumer.num_leased_experiences == sum(
                len(unit) for units in held.values() for unit in units
            )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Histories]]:
    class Machine(Histories):
        world = World(tmp_path / "store")
        loop = asyncio.new_event_loop()

    Machine.loop.run_until_complete(Machine.world.open())
    yield Machine
    Machine.loop.run_until_complete(Machine.world.close())
    Machine.loop.close()


def check(machine: type[Histories], num_histories: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=30,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_histories_without_an_estimator(machine: type[Histories]) -> None:
    check(machine, 60)


def test_histories_with_a_group_estimator(machine: type[Histories]) -> None:
    machine.estimator = "rloo"

    async def start() -> None:
        machine.world.computer.start()

    machine.loop.run_until_complete(start())
    check(machine, 40)


def test_the_model_speaks_of_real_keys() -> None:
    assert eid(1, 2).tid == "2/1"
