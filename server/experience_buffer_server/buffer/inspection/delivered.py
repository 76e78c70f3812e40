"""What a training step has consumed, in the order in which it was delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.store.deliveries import Delivered, deliveries
from experience_buffer_server.store.interface import LeaseRow


def delivered_at(
    state: BufferState, consumer: str, step: int, leases: Iterable[LeaseRow]
) -> list[tuple[Entry, Delivered]]:
    """The experiences that a consumer has acknowledged with a step, as far as they are kept.

    Args:
        state: The buffer's.
        consumer: Its name.
        step: The training step.
        leases: All that the store remembers of the buffer.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
    """
    acked = Counter(state.consumer(consumer).timeline.seqs_of(step))
    found = deliveries(leases, consumer, step, acked)
    entries = {entry.record.seq: entry for entry in state.contents.by_seqs(acked)}
    return [(entries[each.seq], each) for each in found if each.seq in entries]
