"""How full the store is, as Prometheus reads it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from experience_buffer_server.store.gauges import StoreGauges
from tests.unit.builders import World, push


def _values(text: str, prefix: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(prefix)]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.on_disk
async def test_the_sizes_are_known_from_the_first_commit_on(world: World) -> None:
    registry = CollectorRegistry()
    registry.register(StoreGauges(world.store))
    prefix = "experience_buffer_store_"
    assert _values(generate_latest(registry).decode(), prefix).keys() == {
        f"{prefix}limit_bytes",
        f"{prefix}disk_free_bytes",
    }
    buffer = await world.create(group_by="none")
    await buffer.push(push((0, 0)))
    sizes = _values(generate_latest(registry).decode(), prefix)
    assert sizes[f"{prefix}limit_bytes"] == world.store.limit_bytes
    assert 0 < sizes[f"{prefix}live_bytes"] <= sizes[f"{prefix}file_bytes"]
    assert sizes[f"{prefix}disk_free_bytes"] > 1 << 20
