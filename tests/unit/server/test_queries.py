"""Looking at single experiences while they leave."""

from __future__ import annotations

import pytest

from experience_buffer import ExperienceNotFoundError
from experience_buffer_server import queries
from tests.unit.server.builders import World, push, uid
from tests.unit.server.test_annotating import settle


async def test_what_is_leaving_is_not_found_rather_than_damaged(world: World) -> None:
    """The store's own process removes payloads before the server hears of it."""
    buffer = await world.create(group_by="none", max_items=1, on_full="evict")
    await buffer.ingest.push(push((0, 0)))
    await settle(buffer)
    name = uid(0, 0)
    assert queries.get(world.store, buffer, name).payload
    buffer.eviction.make_room(1, 0)
    # Nothing here lets the event loop run, so the end of the removal isn't noticed.
    while world.store.payloads(buffer.id, [name])[0] is not None:
        pass
    assert buffer.contents.by_uid(name) is not None
    with pytest.raises(ExperienceNotFoundError, match="holds no experience"):
        queries.get(world.store, buffer, name)
