"""Sample calls that are given up: no lease is left of them, whenever the word comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.rpc import abandoned_samples
from experience_buffer_server.rpc.service import Service
from experience_buffer_server.runtime.callers import Caller, entered
from tests.unit.buffer_verbs import counted
from tests.unit.builders import World, begun, push, turns
from tests.unit.sample_calls import serving


class Context:
    """What a handler asks of a call."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def time_remaining(self) -> None:
        return None

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end(self, *, cancelled: bool) -> None:
        """gRPC is done with it."""

        class Ended:
            def cancelled(self) -> bool:
                return cancelled

        for callback in self.callbacks:
            callback(Ended())


class Trainer:
    """One that calls the service."""

    def __init__(self, world: World, service: Service, buffer: Buffer) -> None:
        self.world, self.service, self.buffer = world, service, buffer

    def sample(self, call_id: int, context: Context | None = None, **fields: Any) -> Any:
        given: dict[str, Any] = {"buffer": "math", "consumer": "trainer", "batch_size": 1} | fields
        request = service_pb2.SampleRequest(call_id=call_id, **given)
        context_: Any = context or Context()
        return self.service.Sample(request, context_)

    async def sampled(self, call_id: int, **fields: Any) -> service_pb2.SampleResponse:
        data = await self.sample(call_id, **fields)
        return service_pb2.SampleResponse.FromString(data)

    async def give_up(self, call_id: int) -> int:
        request = service_pb2.NackRequest(buffer="math", call_id=call_id, unread=True)
        nothing: Any = None
        return (await self.service.Nack(request, nothing)).num_experiences

    @property
    def num_leased(self) -> int:
        return self.buffer.state.consumers["trainer"].num_leased

    @property
    def num_cancelled(self) -> float:
        labels = {"consumer": "trainer", "reason": "cancelled"}
        return counted(self.world, self.buffer, "redelivered_experiences", **labels)


async def trainer(world: World, *members: tuple[int, int]) -> Trainer:
    backend, buffer = await serving(world, *([push(*members)] if members else []))
    return Trainer(world, Service(backend), buffer)


async def test_the_answer_of_a_call_that_was_given_up_is_offered_again(world: World) -> None:
    asker = await trainer(world, (1, 0))
    assert (await asker.sampled(7)).num_units == 1
    assert (asker.num_leased, await asker.give_up(7), asker.num_leased) == (1, 1, 0)
    assert await asker.give_up(7) == 0
    again = await asker.sampled(8)
    # With max_deliveries = 1 it would be quarantined if it had counted.
    assert [one.num_deliveries for one in again.experiences] == [1]
    assert asker.num_cancelled == 1


async def test_what_was_acknowledged_is_not_taken_back(world: World) -> None:
    asker = await trainer(world, (1, 0))
    answer = await asker.sampled(7)
    await asker.buffer.ack(answer.lease.id)
    assert await asker.give_up(7) == 0


async def test_a_call_that_waits_ends(world: World) -> None:
    asker = await trainer(world)
    waiting = await begun(asker.sample(7, timeout_seconds=60.0), 3)
    assert await asker.give_up(7) == 0
    with pytest.raises(errors.CallCancelledError, match="given this call up"):
        await asyncio.wait_for(waiting, 10)
    await asker.buffer.push(push((1, 0)))
    assert (await asker.sampled(8)).num_units == 1, "nobody is in line before it"


async def test_the_word_may_come_before_the_call(world: World) -> None:
    asker = await trainer(world, (1, 0))
    assert await asker.give_up(7) == 0
    with pytest.raises(errors.CallCancelledError, match="given this call up"):
        await asker.sample(7)
    assert asker.num_leased == 0


async def test_a_call_that_comes_again_gives_back_what_its_lost_answer_had(world: World) -> None:
    asker = await trainer(world, (1, 0))
    first, second = await asker.sampled(7), await asker.sampled(7)
    assert first.lease.id != second.lease.id
    assert [one.uid for one in first.experiences] == [one.uid for one in second.experiences]
    assert asker.num_leased == 1


async def test_a_shared_lease_stays_for_the_other_ranks(world: World) -> None:
    asker = await trainer(world, (1, 0), (2, 0))
    fields = {"batch_size": 2, "rank_of": {"rank": 0, "world_size": 2}}
    answer = await asker.sampled(7, **fields)
    assert await asker.give_up(7) == 0
    assert asker.num_leased == 2
    assert (await asker.sampled(8, **fields)).lease.id == answer.lease.id


@pytest.mark.parametrize("call_id", [0, 7])
async def test_a_call_that_is_cut_off_while_its_answer_is_sent(world: World, call_id: int) -> None:
    asker = await trainer(world, (1, 0))
    context = Context()
    await asker.sample(call_id, context)
    context.end(cancelled=True)
    assert (asker.num_leased, asker.num_cancelled) == (0, 1)
    context = Context()
    await asker.sample(call_id, context)
    context.end(cancelled=False)
    assert asker.num_leased == 1


async def test_only_who_called_gives_up(world: World) -> None:
    asker = await trainer(world, (1, 0))
    await asker.sample(7)

    async def other() -> int:
        entered(Caller("somebody else"))
        return await asker.give_up(7)

    assert await asyncio.create_task(other()) == 0
    assert asker.num_leased == 1
    assert await asker.give_up(7) == 1


async def test_what_is_remembered_of_calls_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned_samples, "_MAX_KNOWN", 3)
    asker = await trainer(world, *((task, 0) for task in range(4)))
    for number in range(1, 5):
        await asker.sample(number)
    assert [await asker.give_up(number) for number in (2, 3, 4)] == [1, 1, 1]
    assert await asker.give_up(1) == 0
    await turns()
