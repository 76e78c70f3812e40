"""How full the store is, and when it will be."""

from __future__ import annotations

import pytest

from experience_buffer_server.store.fullness import Fullness
from experience_buffer_server.store.interface import StoreStats
from experience_buffer_server.store.lmdb.disk.disk_room import reserve_bytes
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.unit.builders import World, push

MEBI = 1 << 20


def set_stats(fullness: Fullness, live: int, file: int) -> None:
    fullness._store.stats = StoreStats(live_bytes=live, file_bytes=file, map_bytes=1 << 30)


@pytest.mark.on_disk
async def test_a_real_store_says_how_full_it_is(world: World) -> None:
    buffer = await world.holding(push((1, 0), (2, 0)), group_by="none")
    await buffer.drain()
    told = Fullness(world.store).told(world.store.disk_free_bytes())
    assert told.place == str(world.path)
    assert 0 < told.live_bytes <= told.file_bytes <= told.map_bytes <= told.limit_bytes
    assert told.free_bytes
    assert told.used_ratio is not None
    assert 0 < told.used_ratio < 1
    assert (told.growth_bytes_per_second, told.full_in_seconds, told.full_by) == (None, None, "")
    assert isinstance(world.store, LmdbStore)
    limit = world.store.limit_bytes
    assert world.store.append_limit_bytes == limit - reserve_bytes(limit)


@pytest.mark.parametrize(("free", "by"), [(10_000 * MEBI, "store.max_map_bytes"), (100, "disk")])
async def test_the_tighter_limit_is_what_it_will_reach(world: World, free: int, by: str) -> None:
    fullness, store = Fullness(world.store), world.store
    store.limit_bytes = 1000 * MEBI
    store.append_limit_bytes = 900 * MEBI
    set_stats(fullness, 0, 0)
    fullness.look(0.0)  # The writer hasn't said yet.
    for second in range(6, 67, 6):
        set_stats(fullness, second * MEBI, 100 * MEBI)
        fullness.look(float(second))
    told = fullness.told(free)
    assert told.growth_bytes_per_second == pytest.approx(MEBI)
    assert told.full_by == by
    room = 900 - 66 if by != "disk" else 100 - 66
    assert told.full_in_seconds == pytest.approx(room, rel=1e-3)
    assert told.used_ratio == pytest.approx(66 / (66 + room), rel=1e-3)
    assert "full in" in str(told)
