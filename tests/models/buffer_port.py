"""A buffer over a real store, driven in this process, that crashes on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from experience_buffer import errors, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.priorities import PriorityUpdate
from experience_buffer_server.buffer.delivery.rank_batches import RankOf
from experience_buffer_server.buffer.intake.push_reading import Push
from tests.models import told, whole_state
from tests.models.model import SIZE, Model
from tests.models.model_place import Reader
from tests.models.port import Delivered, Item, Port, Refused
from tests.refusing_store import Mortality
from tests.unit.builders import World, eid, experience, settings, want

T = TypeVar("T")
_payloads: dict[tuple[Item, ...], bytes] = {}


def payload(items: Sequence[Item]) -> bytes:
    """The TRXP payload of experiences; a task's response lengths differ."""
    key = tuple(items)
    if key and key not in _payloads:
        made = [experience(t, r, info={"model_version": version}) for t, r, version in items]
        _payloads[key] = trxp.encode(made)
    return _payloads[key] if key else b""


LOOKS = 5
"""What is told is looked at after each of so many steps: it takes as long as all else of them."""
_GROUP_SECONDS = 20_000.0
"""Longer than any lease."""


class BufferPort:
    """Drives one buffer; see `port.LocalPort`."""

    clock_error_seconds = 0.0

    def __init__(
        self,
        world: World,
        loop: asyncio.AbstractEventLoop,
        mortality: Mortality,
        number: int,
        readers: dict[str, Reader],
        *,
        estimator: str = "",
    ) -> None:
        self._world = world
        self._loop = loop
        self._dies_meanwhile = False
        self._seqs: set[int] = set()
        self._num_looks = 0
        self._last_seq = 0
        self._estimator = estimator
        self._mortality = mortality
        self.buffer = loop.run_until_complete(world.create(number, **self._config(readers)))

    def _config(self, readers: dict[str, Reader]) -> dict[str, Any]:
        return {
            "group_size": SIZE,
            "group_deadline_seconds": _GROUP_SECONDS,
            "on_group_deadline": "use_partial",
            "consumers": [{"name": name} | reader for name, reader in readers.items()],
            "advantage": {"estimator": self._estimator},
        }

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, and everything that it left to be done."""

        async def all_of_it() -> T:
            try:
                return await (self._die_in(work) if self._dies_meanwhile else work)
            except errors.ExperienceBufferError as error:
                raise Refused(error.status) from error
            finally:
                await self._settle()

        return self._loop.run_until_complete(all_of_it())

    async def _settle(self) -> None:
        """Wait for commits, and for computations and their commits."""
        deadline = time.monotonic() + 60
        while True:
            await self.buffer.drain()
            if not self.buffer.flow.computing.num_jobs:
                return
            assert time.monotonic() < deadline, "a computation never ended"
            await asyncio.sleep(0)

    async def _die_in(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        for _ in range(5):
            await asyncio.sleep(0)
        await self._mortality.die()
        return await task

    def push(self, live: Sequence[Item], dead: Sequence[Item]) -> list[str]:
        return self.run(self._push(live, dead))

    async def _push(self, live: Sequence[Item], dead: Sequence[Item]) -> list[str]:
        tombstones = [(eid(task, run), "gone") for task, run, _ in dead]
        payloads = [payload(live)] if live else []
        outcomes = await self.buffer.push(Push(payloads=payloads, tombstones=tombstones))
        return [outcome.status.value for outcome in outcomes]

    def push_at_once(
        self, pushes: Sequence[tuple[Sequence[Item], Sequence[Item]]]
    ) -> list[list[str]]:

        async def all_at_once() -> list[list[str]]:
            return await asyncio.gather(*(self._push(live, dead) for live, dead in pushes))

        return self.run(all_at_once())

    def seal(self, key: str) -> None:
        self.run(self.buffer.seal(key, 0))

    def drop(self, key: str) -> int:
        return self.run(self.buffer.drop(key, "aborted"))

    def sample(
        self, name: str, wanted: int, seconds: float, rank_of: tuple[int, int, int] | None
    ) -> Delivered | None:
        rank = None
        if rank_of is not None:
            rank = RankOf(rank=rank_of[0], world_size=rank_of[1], after_lease_id=rank_of[2])
        call = self.buffer.sample(
            name, want(wanted, lease_seconds=seconds), asyncio.Event(), rank_of=rank
        )
        lease, why = self.run(call)
        units = [] if lease is None else lease.units if rank is None else lease.part(rank.rank)
        assert rank is not None or (len(units) < wanted) == bool(why)
        if lease is None:
            return None
        entries = {
            seq: self.buffer.state.contents.by_seq(seq) for unit in units for seq in unit.seqs
        }
        found = {seq: entry.record for seq, entry in entries.items() if entry is not None}
        return Delivered(
            lease_id=lease.id,
            units=[[found[seq].uid for seq in unit.seqs] for unit in units],
            deadline=lease.deadline,
            generations={record.uid: record.generation for record in found.values()},
        )

    def ack(self, lease_id: int, step: int | None, rank: int | None) -> int:
        return self.run(self.buffer.ack(lease_id, step=step, rank=rank)).num_experiences

    def nack(self, lease_id: int) -> int:
        return self.run(self.buffer.nack(lease_id, reason="x"))

    def extend(self, lease_id: int, seconds: float) -> float:
        return self.run(self.buffer.extend(lease_id, seconds)).deadline

    def rewind(self, name: str, step: int) -> tuple[int, int]:
        found = self.run(self.buffer.rewind(name, step))
        return found.num_experiences, found.num_leases

    def declare_safe(self, name: str, step: int) -> None:
        self.run(self.buffer.declare_safe(name, step))

    def release(self, name: str, uids: Sequence[str]) -> int:
        return self.run(self.buffer.release(name, uids))

    def prioritize(self, updates: Sequence[tuple[str, float, int]]) -> tuple[int, int, int]:
        changes = [PriorityUpdate(uid=u, priority=p, generation=g) for u, p, g in updates]
        found = self.run(self.buffer.update_priorities(changes))
        return found.num_updated, len(found.unknown_uids), len(found.outdated_uids)

    def delete(self, uid: str) -> bool:
        entry = self.buffer.state.contents.by_uid(uid)
        assert entry is not None
        return self.run(self.buffer.delete([entry])) == ([], 1)

    def publish(self, version: int) -> None:
        self.run(self.buffer.publish(version))

    def change(self, readers: dict[str, Reader]) -> None:
        self._do(self.buffer.change_settings, settings(**self._config(readers)))

    def let_expire(self, lease_ids: Sequence[int]) -> None:
        leases = [self.buffer.state.leases.find(lease_id) for lease_id in lease_ids]
        self._do(self.buffer.tick, max(lease.deadline for lease in leases if lease is not None))

    def let_groups_close(self) -> None:
        self._do(self.buffer.tick, time.time() + 1.5 * _GROUP_SECONDS)

    def _do(self, call: Callable[..., object], *arguments: object) -> None:
        """A call that has to be made in the loop, and all that comes of it."""

        async def do() -> None:
            call(*arguments)

        self.run(do())

    def crash(self) -> None:
        """What is in memory is lost, and all of it known again."""
        before = whole_state.everything(self.buffer)
        self._reload()
        changed = whole_state.differences(before, whole_state.everything(self.buffer))
        assert not changed, "\n".join(changed)

    def _reload(self) -> None:
        async def reload() -> Buffer:
            return self._world.reload(self.buffer)

        self.buffer = self._loop.run_until_complete(reload())
        self._loop.run_until_complete(self._settle())

    def crash_during(self, call: Callable[[Port], object], num_commits: int) -> None:
        """The process dies after some commits of a call."""
        self._mortality.commits_left = num_commits
        self._dies_meanwhile = True
        with contextlib.suppress(asyncio.CancelledError):
            call(self)
        self._dies_meanwhile = False
        self._reload()

    def close(self) -> None:
        """Leave nothing in the store."""

        async def remove() -> None:
            self.buffer.close()
            batch = self._world.store.batch()
            batch.delete_buffer(self.buffer.id)
            await self._world.store.commit(batch)

        self.run(remove())

    # --- what there is

    def observed(self, *expected: dict[str, Any]) -> dict[str, Any]:
        # Numbers go on where they were, also where the last that was given has left.
        seqs = {entry.record.seq for entry in self.buffer.state.contents}
        assert all(seq > self._last_seq for seq in seqs - self._seqs), "a number is given again"
        self._seqs, self._last_seq = seqs, max(seqs | {self._last_seq})
        self._num_looks += 1
        if self._num_looks % LOOKS == 0:
            self.run(told.check(self.buffer))
        return whole_state.observed(self.buffer)

    def expected(self, model: Model) -> dict[str, Any]:
        return whole_state.expected(model)
