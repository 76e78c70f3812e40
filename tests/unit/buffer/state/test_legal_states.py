"""Which states of a buffer are legal: each rule passes where it holds, and says where it doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.sampling.units import Unit
from tests.unit.buffer_verbs import sampled
from tests.unit.builders import World, push, uid


async def filled(world: World) -> Buffer:
    """A group that is ready, one that is leased, one that is open, and a tombstone."""
    consumers = [{"name": "trainer"}, {"name": "raw", "unit": "item", "raw": True}]
    buffer = await world.create(group_size=2, consumers=consumers)
    await buffer.push(push((1, 0), dead=[(1, 1)]))
    await sampled(buffer)
    await buffer.push(push((2, 0), (2, 1), (3, 0)))
    return buffer


def entry_of(state: BufferState, task: int, run: int) -> Entry:
    entry = state.contents.by_uid(uid(task, run))
    assert entry is not None
    return entry


def not_durable(state: BufferState) -> None:
    entry_of(state, 2, 0).durable = False


def available_and_changing(state: BufferState) -> None:
    entry_of(state, 2, 0).changing = True


def available_and_lacking(state: BufferState) -> None:
    state.contents.set_missing(entry_of(state, 2, 0), ("reward",))


def unlisted_quarantine(state: BufferState) -> None:
    entry_of(state, 2, 0).quarantine = "nobody knows"


def tombstone_computed(state: BufferState) -> None:
    entry_of(state, 1, 1).computing = True


def torn_group(state: BufferState) -> None:
    entry = entry_of(state, 2, 1)
    assert entry.group is not None
    entry.group.members.remove(entry)


def open_and_available(state: BufferState) -> None:
    group = entry_of(state, 3, 0).group
    assert group is not None
    group.available = True


def ready_and_out(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    key = next(iter(consumer.ready))
    consumer.out[key] = Unit(key=key, seqs=(), num_bytes=0, num_tokens=0)


def ready_and_finished(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    consumer.finished.add(next(iter(consumer.ready)))


def held_and_out(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    consumer.held[next(iter(consumer.out))] = 5


def ready_and_gone(state: BufferState) -> None:
    state.consumers["trainer"].ready.add(9999)


def not_available_to_all(state: BufferState) -> None:
    entry_of(state, 2, 0).available = False


def lease_nobody_has(state: BufferState) -> None:
    state.consumers["trainer"].leases.clear()


def miscounted(state: BufferState) -> None:
    state.contents.num_bytes += 1


TAMPERING: dict[Callable[[BufferState], None], str] = {
    not_durable: "on its way to the disk",
    available_and_changing: "while an annotation of it is on its way",
    available_and_lacking: r"is available and lacks \('reward',\)",
    unlisted_quarantine: "is quarantined for nobody knows, and is listed otherwise",
    tombstone_computed: "is a tombstone, and available, computed",
    torn_group: "isn't a member of the group that its record names",
    open_and_available: "is available and not whole",
    ready_and_out: "is ready and out",
    ready_and_finished: "is ready and finished",
    held_and_out: "is held and out",
    ready_and_gone: "unit 9999 is ready, and nothing of it stays",
    not_available_to_all: "is ready, and its .* isn't available",
    lease_nobody_has: r"has leases \[\], and the table",
    miscounted: "and counts",
}


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
async def test_what_is_not_legal_is_said(
    world: World, tamper: Callable[[BufferState], None]
) -> None:
    state = (await filled(world)).state
    state.check()
    tamper(state)
    with pytest.raises(AssertionError, match=TAMPERING[tamper]):
        state.check()
