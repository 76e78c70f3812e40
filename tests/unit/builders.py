"""Payloads, settings and buffers over a real store, for the tests of the server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from experience_buffer import EID, Experience, trxp
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.flow import Flow
from experience_buffer_server.buffer.intake.admission import PayloadReader
from experience_buffer_server.buffer.intake.push_reading import Push
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.buffer.restore import restore
from experience_buffer_server.buffer.state.consumers import Want
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.buffer import BufferSettings
from experience_buffer_server.settings.server import (
    ComputeSection,
    ServerSection,
    Settings,
    SnapshotsSection,
)
from experience_buffer_server.store.interface import BufferRow, Store
from experience_buffer_server.store.lmdb.snapshots.snapshots import Snapshots
from experience_buffer_server.store.lmdb.store import LmdbStore
from experience_buffer_server.store.memory import MemoryData, MemoryStore
from tests.unit.local_worker import LocalWorker

DATA = Path(__file__).parents[1] / "data" / "trxp"
NUM_PROMPT, NUM_RESPONSE = 3, 7


def eid(task: int, run: int, step: int = 0) -> EID:
    return EID(batch=2, task=task, run=run, step=step, suffix="a1")


def uid(task: int, run: int, step: int = 0) -> str:
    return eid(task, run, step).uid


def experience(task: int, run: int, **fields: Any) -> Experience:
    given: dict[str, Any] = {
        "tokens": torch.arange(NUM_PROMPT + NUM_RESPONSE) + 13 * run,
        "logprobs": -torch.full((NUM_RESPONSE,), 0.5),
        "prompt_length": NUM_PROMPT,
        "reward": run / 5.0,
    }
    return Experience(eid=eid(task, run, fields.pop("step", 0)), **(given | fields))


def hold(experience: Experience, **fields: Any) -> None:
    """Give it what only another sender's payload may hold: its own attributes refuse it."""
    for name, value in fields.items():
        known = vars(experience)
        if name in known:
            known[name] = value
        else:
            experience.extra.kept()[name] = value


@cache
def payload(*members: tuple[int, int]) -> bytes:
    """The TRXP payload of experiences given as (task, run)."""
    return trxp.encode([experience(task, run) for task, run in members])


def push(*members: tuple[int, int], dead: Sequence[tuple[int, int]] = (), size: int = 0) -> Push:
    """A push of (task, run) experiences and tombstones."""
    return Push(
        payloads=[payload(*members)] if members else [],
        tombstones=[(eid(task, run), "gone") for task, run in dead],
        group_size=size,
    )


def want(batch_size: int, **changes: Any) -> Want:
    values: dict[str, Any] = {
        "batch_size": batch_size,
        "min_batch_size": 1,
        "timeout_seconds": 0.0,
        "lease_seconds": 100.0,
        "max_bytes": 1 << 40,
    }
    return Want(**(values | changes))


def settings(**changes: Any) -> BufferSettings:
    return BufferSettings.model_validate(changes)


async def turns(count: int = 1) -> None:
    """Let all else that is ready have so many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(call: Coroutine[Any, Any, Any], num_turns: int = 1) -> asyncio.Task[Any]:
    """A call under way, after so many turns of the event loop."""
    task = asyncio.create_task(call)
    await turns(num_turns)
    return task


async def until(condition: Callable[[], object]) -> None:
    """Wait turn by turn; then for what a process or thread brings about, which gets the processor."""
    deadline = time.monotonic() + 60
    for turn in itertools.count():
        if condition():
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0 if turn < 1000 else 0.001)


async def settle(buffer: Buffer, *, after: float | None = None) -> None:
    """Wait for a buffer's commits, and for its computations and their commits.

    Args:
        buffer: The buffer.
        after: Before that, it is told that so many seconds have passed.
    """
    if after is not None:
        buffer.tick(clock.now() + after)
    deadline = time.monotonic() + 60
    await buffer.drain()
    while buffer.flow.computing.num_jobs:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
        await buffer.drain()


class World:
    """A store in a folder, a computer that isn't started unless asked, and buffers in them.

    It computes in a thread of this process, unless it is told to have a `worker_process`.

    Args:
        path: The store's folder.
        in_memory: The store is in memory: a tenth of the time, for tests of what is decided and not of
            what a disk, a process or a crash does.
        worker_process: Whether advantages are computed by a process.
        store_options: Of `LmdbStore.open`.
    """

    def __init__(
        self,
        path: Path,
        *,
        in_memory: bool = False,
        worker_process: bool = False,
        **store_options: Any,
    ) -> None:
        self.path = path
        self._data = MemoryData() if in_memory else None
        self.metrics = Metrics()
        self.computer = Computer(
            ComputeSection(device="cpu", max_latency_seconds=0.0), str(path), self.metrics
        )
        if not worker_process:
            setattr(self.computer, "_spawn", self._worker)  # noqa: B010
        self.limits = ServerSection(max_push_items=97)
        self.store: Store
        self._options: dict[str, Any] = {
            "durability": "interval",
            "initial_map_bytes": 16 << 20,
        } | store_options

    async def _worker(self) -> LocalWorker:
        return LocalWorker(lambda: self.store)

    async def open(self) -> None:
        if self._data is None:
            self.store = await LmdbStore.open(self.path, **self._options)
        else:
            self.store = MemoryStore(self._data)

    @property
    def lmdb(self) -> LmdbStore:
        """The store that is no interface."""
        assert self._data is None
        return cast(LmdbStore, self.store)  # or what stands in front of one

    async def close(self) -> None:
        await self.computer.close()
        await self.store.close()

    async def create(self, buffer_id: int = 1, **changes: Any) -> Buffer:
        row = BufferRow(
            id=buffer_id,
            name=f"buffer-{buffer_id}",
            config=settings(**changes).model_dump_json(),
            policy_version=None,
            create_time=time.time(),
        )
        batch = self.store.batch()
        batch.put_buffer(row)
        await self.store.commit(batch)
        return self._buffer(row)

    async def holding(self, *pushes: Push, **changes: Any) -> Buffer:
        """A buffer to which all that was pushed."""
        buffer = await self.create(**changes)
        for each in pushes:
            await buffer.push(each)
        return buffer

    async def computing(self, *pushes: Push, **changes: Any) -> Buffer:
        """A buffer to which all that was pushed, and the computer of advantages is started."""
        self.computer.start()
        return await self.holding(*pushes, **changes)

    async def computed(self, *pushes: Push, **changes: Any) -> Buffer:
        """A buffer to which all that was pushed, and of which what can be was computed."""
        buffer = await self.computing(*pushes, **changes)
        await settle(buffer)
        return buffer

    def registry(self) -> Registry:
        """Buffers by their names, of which it knows none before `load`."""
        return Registry(Settings(), self.store, self.computer, self.metrics)

    async def backend(self, name: str = "math", **changes: Any) -> Backend:
        """What is behind the service, with one buffer."""
        registry = self.registry()
        await registry.create(name, settings(**changes))
        snapshots = Snapshots(SnapshotsSection(), Path("unused"), self.metrics)
        return Backend(registry, self.store, self.limits, asyncio.Event(), snapshots)

    async def restart(self, buffer: Buffer) -> Buffer:
        """Close the store, open it again, and restore the buffer from it."""
        await buffer.drain()
        await self.store.close()
        await self.open()
        return self.reload(buffer)

    def reload(self, buffer: Buffer) -> Buffer:
        """The buffer as another process would restore it now."""
        (state,) = [state for state in self.store.load() if state.row.id == buffer.id]
        fresh = self._buffer(state.row)
        restore(fresh, state, self.store)
        return fresh

    def payload(self, buffer: Buffer, uid: str) -> bytes:
        """The stored payload of an experience."""
        (payload,) = self.store.payloads(buffer.id, [uid])
        assert isinstance(payload, bytes)
        return payload

    def _buffer(self, row: BufferRow) -> Buffer:
        flow = Flow(
            row,
            store=self.store,
            computer=self.computer,
            metrics=self.metrics,
            payloads=PayloadReader(self.limits.payload_limits, self.metrics),
            limits=self.limits,
        )
        return Buffer(flow)
