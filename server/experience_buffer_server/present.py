"""What is in a buffer of one consumer's units: for limits on how far pushes run ahead of it.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from experience_buffer_server.catalog import key_of, units_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents


def num_deliverable(contents: Contents, consumer: Consumer) -> int:
    """The consumer's units in the buffer, also those that aren't whole, computed or consumed yet.

    Not those whose advantages can't be computed, that can't be read, or whose group was dropped:
    nobody gets them, so pushes must not wait until they are sampled.
    """
    by_item = consumer.settings.unit == "item"
    num_present = contents.num_items if by_item else len(contents.groups)
    return num_present - _num_out_of_reach(contents, consumer)


def _num_out_of_reach(contents: Contents, consumer: Consumer) -> int:
    """Those that it can't get, but for what it is done with, or is kept from: that counts elsewhere.

    What it has consumed may be found damaged when another consumer is to get it.
    """
    keys = {key_of(consumer.settings, entry) for entry in contents.quarantined.values()}
    keys.discard(0)
    for group in contents.groups.dropped_groups:
        # Somebody else may still hold some of it.
        of_group = units_of(consumer.settings, group)
        keys.update(key for key in of_group if key not in consumer.out)
    idle = (consumer.finished, consumer.held, consumer.quarantined)
    return sum(not any(key in others for others in idle) for key in keys)
