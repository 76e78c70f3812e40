"""What a training step has consumed, in the order in which it was delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Entry
from experience_buffer_server.store.deliveries import Delivered, deliveries
from experience_buffer_server.store.interface import LeaseRow


def delivered_at(
    state: BufferState,
    consumer: str,
    step: int,
    leases: Iterable[LeaseRow],
    gone: Mapping[int, int],
) -> tuple[dict[int, Entry], list[Delivered]]:
    """The experiences that a consumer has acknowledged with a step, in the order of their delivery.

    Args:
        state: The buffer's.
        consumer: Its name.
        step: The training step.
        leases: All that the store remembers of the buffer.
        gone: By seq, how often it has acknowledged those that have left.

    Returns:
        Those that are here, by seq, and the order of all.

    Raises:
        ConsumerNotFoundError: There is no such consumer.
    """
    acked = Counter(state.consumer(consumer).timeline.seqs_of(step))
    entries = {entry.record.seq: entry for entry in state.contents.by_seqs(acked)}
    # What is on its way into the archive may be in both.
    known = {**gone, **acked}
    return entries, deliveries(leases, consumer, step, known)
