"""How full the store is, and what becomes of a deleted buffer's series."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from experience_buffer_server.runtime.metrics import Metrics
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


def test_a_deleted_buffer_leaves_no_series() -> None:
    """A buffer per run, for months, must not fill the memory of the server and of Prometheus."""
    metrics = Metrics()
    for name in ("kept", "gone"):
        metrics.pushed(name, "stored", "", 3)
        metrics.sampled(name, "trainer", num_bytes=5, ages=[0.5], staleness=[2])
    metrics.rpc_started("unary", "service", "gone")
    metrics.forget_buffer("gone")
    text = generate_latest(metrics.registry).decode()
    assert 'buffer="gone"' not in text
    assert 'outcome="stored",reason=""} 3.0' in text
    assert 'buffer="kept",consumer="trainer"' in text
    assert 'grpc_method="gone"' in text, "a method isn't a buffer"
    metrics.pushed("gone", "stored", "", 1)
    assert (
        'buffer="gone",outcome="stored",reason=""} 1.0'
        in generate_latest(metrics.registry).decode()
    )
