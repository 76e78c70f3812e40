"""What is in a buffer of one consumer's units: for limits on how far pushes run ahead of it.

Belongs to one buffer and its event loop.
"""

from __future__ import annotations

from experience_buffer_server.catalog import key_of
from experience_buffer_server.consumers import Consumer
from experience_buffer_server.contents import Contents


def num_deliverable(contents: Contents, consumer: Consumer) -> int:
    """The consumer's units in the buffer, also those that aren't whole, computed or consumed yet.

    Not those whose advantages can't be computed, or that can't be read: nobody gets them, so pushes
    must not wait until they are sampled.
    """
    by_item = consumer.settings.unit == "item"
    num_present = contents.num_items if by_item else len(contents.groups)
    return num_present - _num_uncomputable(contents, consumer)


def _num_uncomputable(contents: Contents, consumer: Consumer) -> int:
    """But those that it can't get anyway.

    What it has consumed may be found damaged when another consumer is to get it.
    """
    keys = {key_of(consumer.settings, entry) for entry in contents.quarantined.values()}
    idle = (consumer.finished, consumer.held, consumer.quarantined)
    return sum(not any(key in others for others in idle) for key in keys)
