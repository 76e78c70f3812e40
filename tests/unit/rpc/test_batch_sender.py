"""Batches on their way: cut into parts and messages, and counted once they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.rpc.batch_sender import _in_parts, _trxp_parts
from experience_buffer_server.rpc.flow_control import FRAME_BYTES
from experience_buffer_server.sampling.units import Unit
from tests.unit.buffer_verbs import leased
from tests.unit.builders import World, push


def value(world: World, name: str, buffer: Buffer) -> float | None:
    labels = {"buffer": buffer.name, "consumer": "trainer"}
    return world.metrics.registry.get_sample_value(f"experience_buffer_{name}", labels)


async def test_each_experience_of_a_delivery_is_counted(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1), (2, 0)))
    await leased(buffer, 2)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) == 2
    assert value(world, "queue_age_seconds_count", buffer) == 2
    await leased(buffer, 1)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) == 3


async def test_a_buffer_that_is_deleted_at_once_has_no_series_again(world: World) -> None:
    buffer = await world.holding(push((1, 0)))
    await leased(buffer, 1)
    buffer.close()
    world.metrics.forget_buffer(buffer.name)
    await asyncio.sleep(0)
    assert value(world, "sampled_experiences_total", buffer) is None


HALF = FRAME_BYTES // 2


def units(sizes: Sequence[int]) -> list[Unit]:
    """What they take in a message counts, computed advantages included, not what is stored."""
    return [
        Unit(key=number, seqs=(number,), num_bytes=7, num_tokens=1, message_bytes=size)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([1], [[1]]),
        ([HALF, HALF, 1], [[HALF, HALF], [1]]),
        ([HALF, HALF + 1, HALF], [[HALF], [HALF + 1], [HALF]]),
        ([1, 9 * FRAME_BYTES, 1, 1], [[1], [9 * FRAME_BYTES], [1, 1]]),
        ([FRAME_BYTES, FRAME_BYTES], [[FRAME_BYTES], [FRAME_BYTES]]),
    ],
)
def test_parts_are_as_large_as_a_message_or_one_unit(
    sizes: list[int], expected: list[list[int]]
) -> None:
    batch = units(sizes)
    parts = _trxp_parts(batch, FRAME_BYTES)
    assert [[unit.message_bytes for unit in part] for part in parts] == expected
    assert [unit for part in parts for unit in part] == batch


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([99], [[99]]),
        ([4, 6, 1, 9], [[4, 6], [1, 9]]),
        ([4, 7, 4], [[4], [7], [4]]),
        ([1, 99, 1], [[1], [99], [1]]),
    ],
)
def test_a_message_holds_what_it_may_or_one_experience(
    sizes: list[int], expected: list[list[int]]
) -> None:
    assert _in_parts(sizes, sizes, 10) == expected
