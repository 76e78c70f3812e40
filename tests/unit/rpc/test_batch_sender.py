"""What is counted of a delivery, once its answer is on its way."""

from __future__ import annotations

import asyncio

from experience_buffer_server.buffer.buffer import Buffer
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, push


def value(world: World, name: str, buffer: Buffer) -> float | None:
    labels = {"buffer": buffer.name, "consumer": "trainer"}
    return world.metrics.registry.get_sample_value(f"experience_buffer_{name}", labels)


async def test_each_experience_of_a_delivery_is_counted(world: World) -> None:
    buffer = await world.create()
    await buffer.push(push((1, 0), (1, 1), (2, 0)))
    await leased(buffer, 2)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) == 2
    assert value(world, "queue_age_seconds_count", buffer) == 2
    await leased(buffer, 1)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) == 3


async def test_a_buffer_that_is_deleted_at_once_has_no_series_again(world: World) -> None:
    buffer = await world.create()
    await buffer.push(push((1, 0)))
    await leased(buffer, 1)
    buffer.close()
    world.metrics.forget_buffer(buffer.name)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) is None
