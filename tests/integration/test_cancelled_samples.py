"""Calls that sample and are cancelled, or whose answer is lost, leave no lease behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from experience_buffer import AsyncClient, CallCancelledError, Client, DeadlineExceededError
from experience_buffer._async.primitives import Answer
from experience_buffer._messages import delivery_calls
from experience_buffer._sync.connection import Connection
from tests.integration.buffers import create, stats, trainer
from tests.integration.plain import experience
from tests.integration.server import Server, eventually


async def test_calls_that_are_cancelled_at_any_moment(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name)
    async with AsyncClient(shared_server.address, timeout=20) as asker:
        for number in range(60):
            call = asyncio.create_task(asker.sample(1, buffer=name, timeout=5.0))
            await asyncio.sleep(0.01)
            push = asyncio.create_task(asker.push([experience(number, 0)], buffer=name))
            await asyncio.sleep(0.0005 * (number % 20))
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await call).ack()
            await push
            while batch := await asker.sample(100, buffer=name, min_batch_size=1, timeout=0.0):
                await batch.ack()
    await asyncio.to_thread(
        eventually, lambda: trainer(client, name).num_leased_units == 0, "nothing leased"
    )
    while batch_ := client.sample(100, buffer=name, min_batch_size=1, timeout=0.2):
        assert set(batch_.num_deliveries) == {1}, "nobody has looked at them"
        batch_.ack()
    assert stats(client, name).num_items == 0, "all of them came"


async def test_a_wait_with_a_bound_of_its_own(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name)
    client.push([experience(0, 0)], buffer=name)
    async with AsyncClient(shared_server.address, timeout=20) as asker:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asker.sample(2, buffer=name, timeout=10.0), 0.3)
        await asyncio.to_thread(
            eventually, lambda: trainer(client, name).num_waiting == 0, "nobody waits"
        )
        batch = await asker.sample(1, buffer=name, timeout=5.0)
        assert batch.num_deliveries == (1,)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_interrupts_a_call_loses_no_batch(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    create(client, name)
    client.push([experience(0, 0)], buffer=name)

    def interrupted(received: Any) -> dict[str, Any]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(delivery_calls, "sampled", interrupted)
        with pytest.raises(error):
            client.sample(1, buffer=name)
    assert trainer(client, name).num_leased_units == 0
    assert client.sample(1, buffer=name).num_deliveries == (1,)


def test_an_answer_that_came_too_late_is_given_back(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(client, name)
    client.push([experience(0, 0)], buffer=name)
    run = Connection._run

    def late(self: Connection, call: Any, timeout: float | None = None) -> Any:
        run(self, call, timeout)
        raise DeadlineExceededError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_run", late)
        with pytest.raises(DeadlineExceededError):
            client.sample(1, buffer=name)
    assert trainer(client, name).num_leased_units == 0


def test_closing_a_client_ends_its_calls_on_the_server_too(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name)
    with Client(shared_server.address, timeout=20) as asker:
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                asker.sample(1, buffer=name, timeout=10.0)
            except CallCancelledError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: trainer(client, name).num_waiting == 1, "one waits")
    thread.join(10)
    assert len(failed) == 1
    client.push([experience(0, 0)], buffer=name)
    assert trainer(client, name).num_leased_units == 0


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancellation_that_comes_with_an_answer_is_not_lost(num_turns: int) -> None:
    answer = Answer[int]()
    waiting = asyncio.create_task(answer.wait(10.0))
    await asyncio.sleep(0)
    answer.set(1)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert await waiting == 1


async def test_streams_that_are_cancelled_leave_nothing(
    shared_server: Server, client: Client, name: str
) -> None:
    create(client, name)
    async with AsyncClient(shared_server.address, timeout=20) as asker:
        for number in range(12):
            client.push([experience(number, run) for run in range(3)], buffer=name)

            async def train() -> None:
                async with asker.stream(1, buffer=name) as batches:
                    async for batch in batches:
                        await batch.ack()

            training = asyncio.create_task(train())
            await asyncio.sleep(0.004 * number)
            training.cancel()
            with pytest.raises(asyncio.CancelledError):
                await training
    await asyncio.to_thread(
        eventually, lambda: trainer(client, name).num_leased_units == 0, "nothing leased"
    )
