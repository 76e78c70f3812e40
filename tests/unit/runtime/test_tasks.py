"""Work that goes on to its end, whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from experience_buffer_server.runtime.tasks import Tasks


async def test_who_waits_gets_the_result_or_the_failure() -> None:
    async def work(result: int) -> int:
        await asyncio.sleep(0)
        return 100 // result

    tasks = Tasks()
    assert await tasks.finish(work(4)) == 25
    with pytest.raises(ZeroDivisionError):
        await tasks.finish(work(0))
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done.set_result(7)
    assert await tasks.finish(done) == 7
    await tasks.drain()


async def test_work_goes_on_without_who_waited() -> None:
    seen: list[str] = []
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        seen.append("done")

    tasks = Tasks()
    waiting = asyncio.ensure_future(tasks.finish(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await tasks.drain()
    assert seen == ["done"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_failure_that_nobody_waits_for_is_not_reported(is_cancelled: bool) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("nobody is there")

    tasks = Tasks()
    told = tasks.begin(fail())
    if is_cancelled:
        told.cancel()
    await tasks.drain()
    del told
    gc.collect()
    assert reports == []


async def test_cancelled_work_cancels_who_waits() -> None:
    tasks = Tasks()
    before = asyncio.all_tasks()
    told = tasks.begin(asyncio.Event().wait())
    await asyncio.sleep(0)
    (running,) = asyncio.all_tasks() - before
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(told, 10)


async def test_who_waits_goes_on_one_step_after_the_work() -> None:
    """A batch waits for as many steps of the loop, each of which may be long."""
    steps: list[int] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await done

    async def wait() -> None:
        await tasks.finish(work())
        steps.append(count)

    tasks = Tasks()
    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    done.set_result(None)
    for step in range(6):
        count = step
        await asyncio.sleep(0)
    await waiting
    assert steps == [1]


async def test_work_that_was_cancelled_before_it_began_cancels_who_waits() -> None:
    tasks = Tasks()
    before = asyncio.all_tasks()
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    told = tasks.begin(work)
    (running,) = asyncio.all_tasks() - before
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(told, 10)


async def test_a_failure_keeps_nothing_of_the_call_that_waited() -> None:
    """What the collector has looked past would stay: a refused request, with all its payloads."""

    class Request:
        pass

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("the disk is full")

    async def call(tasks: Tasks) -> weakref.ref[Request]:
        request = Request()
        with contextlib.suppress(ValueError):
            await tasks.finish(fail())
        return weakref.ref(request)

    tasks = Tasks()
    gc.collect()
    gc.disable()
    try:
        request = await call(tasks)
        await tasks.drain()
        await asyncio.sleep(0)
        assert request() is None
    finally:
        gc.enable()
