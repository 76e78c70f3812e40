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
    waiting = asyncio.ensure_future(tasks.finish(fail()))
    await asyncio.sleep(0)
    if is_cancelled:
        waiting.cancel()
    await tasks.drain()
    with contextlib.suppress(asyncio.CancelledError, ValueError):
        await waiting
    del waiting
    gc.collect()
    assert reports == []


async def test_cancelled_work_cancels_who_waits() -> None:
    tasks = Tasks()
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(tasks.finish(asyncio.Event().wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (running,) = asyncio.all_tasks() - before - {waiting}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 10)


async def test_work_that_others_see_to_is_waited_for_at_the_end() -> None:
    tasks = Tasks()
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks.include(work)
    draining = asyncio.ensure_future(tasks.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    work.set_result(None)
    await draining


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
