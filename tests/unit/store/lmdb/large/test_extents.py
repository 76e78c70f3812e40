"""Room in the file of large payloads, against a model that has every block."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES, whole_blocks
from experience_buffer_server.store.lmdb.large.extents import Extents, Freed

SIZES = st.integers(1, 6 * BLOCK_BYTES)


def blocks(offset: int, num_bytes: int) -> set[int]:
    return set(range(offset // BLOCK_BYTES, (offset + whole_blocks(num_bytes)) // BLOCK_BYTES))


class Machine(RuleBasedStateMachine):
    """Transactions that place, free and reclaim, and end in either way."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Extents([])
        self.transaction = 1
        self.stored: dict[int, int] = {}
        """What committed transactions have placed: offset and bytes."""
        self.pending: list[Freed] = []
        self.placed: dict[int, int] = {}
        self.freed: list[Freed] = []
        self.reclaimed: list[Freed] = []

    def kept(self) -> list[tuple[int, int]]:
        freed = [(run.offset, run.num_bytes) for run in (*self.pending, *self.freed)]
        return [*self.stored.items(), *self.placed.items(), *freed]

    @rule(num_bytes=SIZES)
    def place(self, num_bytes: int) -> None:
        taken = {block for run in self.kept() for block in blocks(*run)}
        offset = self.room.place(num_bytes)
        assert offset % BLOCK_BYTES == 0
        assert not taken & blocks(offset, num_bytes), "nothing that is kept is written over"
        self.placed[offset] = num_bytes

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.stored)))
        run = self.room.free(self.transaction, offset, self.stored.pop(offset))
        self.freed.append(run)

    @rule(age=st.integers(0, 3))
    def reclaim(self, age: int) -> None:
        newest = self.transaction - 1 - age
        found = self.room.reclaim(newest)
        assert sorted(found) == sorted(run for run in self.pending if run.transaction <= newest)
        self.pending = [run for run in self.pending if run.transaction > newest]
        self.reclaimed += found

    @rule()
    def commit(self) -> None:
        self.room.commit()
        self.stored |= self.placed
        self.pending += self.freed
        self.placed, self.freed, self.reclaimed = {}, [], []
        self.transaction += 1

    @rule()
    def rollback(self) -> None:
        self.room.rollback()
        self.stored |= {run.offset: run.num_bytes for run in self.freed}
        self.pending = [*self.reclaimed, *self.pending]
        self.placed, self.freed, self.reclaimed = {}, [], []

    @rule()
    def open_again(self) -> None:
        self.rollback()
        self.room = Extents(self.stored.items(), self.pending)

    @invariant()
    def nothing_is_lost(self) -> None:
        kept = [block for run in self.kept() for block in blocks(*run)]
        assert len(kept) == len(set(kept))
        assert self.room.used_bytes == len(kept) * BLOCK_BYTES
        assert self.room.end >= max((1 + block for block in kept), default=0) * BLOCK_BYTES
        assert self.room.pending_bytes == sum(run.num_bytes for run in self.pending)
        assert (self.room.oldest_pending is not None) == bool(self.pending)


Machine.TestCase.settings = settings(max_examples=120, stateful_step_count=60)
TestExtents = Machine.TestCase


def test_what_is_consumed_in_order_makes_room_for_what_follows() -> None:
    """The file of a buffer in balance doesn't grow."""
    room = Extents([])
    stored: list[tuple[int, int]] = []
    for transaction in range(1, 400):
        room.reclaim(transaction - 1)
        for number in range(8):
            num_bytes = 70_000 + 977 * (transaction * 8 + number) % 60_000
            stored.append((room.place(num_bytes), num_bytes))
        while len(stored) > 64:
            room.free(transaction, *stored.pop(0))
        room.commit()
    assert room.end < 3 * 64 * 130_000


def test_overlapping_runs_of_a_damaged_store_are_used_as_a_whole() -> None:
    room = Extents([(0, 10_000), (8192, 4096), (40_960, 1)])
    assert (room.end, room.used_bytes) == (45_056, 4 * BLOCK_BYTES)
    assert room.place(28_000) == 12_288


def test_of_very_much_a_part_is_taken_back_at_a_time() -> None:
    """Whoever stores something waits for it."""
    room = Extents([(0, 5000 * BLOCK_BYTES)])
    for block in range(0, 5000, 2):
        room.free(1, block * BLOCK_BYTES, BLOCK_BYTES)
    room.commit()
    taken = []
    while room.oldest_pending is not None:
        taken.append(len(room.reclaim(1)))
    assert taken == [1000, 1000, 500]
    assert room.used_bytes == 2500 * BLOCK_BYTES
