"""Gauges of buffers, as a scrape reads them from a thread."""

from __future__ import annotations

import asyncio

import pytest

from experience_buffer_server.buffer.gauges import Gauges
from tests.unit.builders import World, push


async def test_gauges_are_read_on_the_loop_and_errors_come_out(world: World) -> None:
    buffer = await world.holding(push((1, 0), (1, 1)), group_size=3)
    loop = asyncio.get_running_loop()
    gauges = Gauges(lambda: [buffer.stats()], loop)
    families = await asyncio.to_thread(lambda: list(gauges.collect()))
    values = {family.name: [s.value for s in family.samples] for family in families}
    assert values["experience_buffer_items"] == [2]
    assert values["experience_buffer_open_groups"] == [1]
    assert values["experience_buffer_ready_units"] == [2]
    assert values["experience_buffer_policy_version"] == []
    broken = Gauges(lambda: [][0], loop)
    with pytest.raises(IndexError):
        await asyncio.to_thread(lambda: list(broken.collect()))
