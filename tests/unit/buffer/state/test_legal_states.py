"""Which states of a buffer are legal: each rule passes where it holds, and says where it doesn't."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry, Group
from experience_buffer_server.sampling.units import Unit
from tests.unit.buffer_verbs import sampled
from tests.unit.builders import World, push, uid

Tamper = Callable[[BufferState], object]


async def filled(world: World) -> Buffer:
    """A group that is ready, one that is leased, one that is open, and a tombstone."""
    consumers = [{"name": "trainer"}, {"name": "raw", "unit": "item", "raw": True}]
    buffer = await world.holding(push((1, 0), dead=[(1, 1)]), group_size=2, consumers=consumers)
    await sampled(buffer)
    await buffer.push(push((2, 0), (2, 1), (3, 0)))
    return buffer


def entry_of(state: BufferState, task: int, run: int) -> Entry:
    entry = state.contents.by_uid(uid(task, run))
    assert entry is not None
    return entry


def set_of(task: int, run: int, name: str, value: object) -> Tamper:
    """Set an attribute of an experience behind the buffer's back."""
    return lambda state: setattr(entry_of(state, task, run), name, value)


def group_of(state: BufferState, task: int) -> Group:
    group = entry_of(state, task, 0).group
    assert group is not None
    return group


def ready_and_out(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    key = next(iter(consumer.ready))
    consumer.out[key] = Unit(key=key, seqs=(), num_bytes=0, num_tokens=0)


def held_and_out(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    consumer.held[next(iter(consumer.out))] = 5


def ready_and_finished(state: BufferState) -> None:
    consumer = state.consumers["trainer"]
    consumer.finished.add(next(iter(consumer.ready)))


TAMPERING: dict[str, Tamper] = {
    "on its way to the disk": set_of(2, 0, "durable", False),
    "while an annotation of it is on its way": set_of(2, 0, "changing", True),
    r"is available and lacks \('reward',\)": (
        lambda state: state.contents.set_missing(entry_of(state, 2, 0), ("reward",))
    ),
    "is quarantined for nobody knows, and is listed otherwise": (
        set_of(2, 0, "quarantine", "nobody knows")
    ),
    "is a tombstone, and available, computed": set_of(1, 1, "computing", True),
    "isn't a member of the group that its record names": (
        lambda state: group_of(state, 2).members.remove(entry_of(state, 2, 1))
    ),
    "is available and not whole": lambda state: setattr(group_of(state, 3), "available", True),
    "is ready and out": ready_and_out,
    "is ready and finished": ready_and_finished,
    "is held and out": held_and_out,
    "unit 9999 is ready, and nothing of it stays": (
        lambda state: state.consumers["trainer"].ready.add(9999)
    ),
    "is ready, and its .* isn't available": set_of(2, 0, "available", False),
    r"has leases \[\], and the table": lambda state: state.consumers["trainer"].leases.clear(),
    "and counts": lambda state: setattr(state.contents, "num_bytes", 1),
}


@pytest.mark.parametrize("problem", TAMPERING)
async def test_what_is_not_legal_is_said(world: World, problem: str) -> None:
    state = (await filled(world)).state
    state.check()
    TAMPERING[problem](state)
    with pytest.raises(AssertionError, match=problem):
        state.check()
