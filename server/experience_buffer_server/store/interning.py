"""Equal values of many records become one object: what stays in memory is some 150 bytes less each.

Rows read from the disk, and pushes decoded one by one, hold numbers of their own even where they
are equal: the versions of a whole batch, the time of all that came in one push.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experience_buffer_server.store.interface import GroupRow, Record

_MAX_NUMBERS = 1024


class Numbers:
    """For numbers of which many are equal, as rewards; the first 1024 are remembered."""

    def __init__(self) -> None:
        self._known: dict[float | str, float] = {}

    def intern(self, number: float) -> float:
        """The equal number that came first."""
        # By its text where it is 0: -0.0 equals 0.0 and is another number.
        key = number or repr(number)
        known = self._known.get(key)
        if known is not None:
            return known
        if len(self._known) < _MAX_NUMBERS:
            self._known[key] = number
        return number


class Interner:
    """For records that come one after another. Not thread-safe."""

    def __init__(self) -> None:
        self._previous: Record | None = None
        self._number = Numbers().intern

    def intern(self, record: Record) -> None:
        """Put what equals the previous record's, or a number seen often, in place of its own."""
        previous, self._previous = self._previous, record
        record.priority = self._number(record.priority)
        if record.reward is not None:
            record.reward = self._number(record.reward)
        if record.max_version == record.min_version:
            record.max_version = record.min_version
        if previous is None:
            return
        # Written out: it happens with every push, and a million times at the start.
        if record.cut == previous.cut:
            record.cut = previous.cut
        if record.group_id == previous.group_id:
            record.group_id = previous.group_id
        if record.response_tokens == previous.response_tokens:
            record.response_tokens = previous.response_tokens
        if record.payload_bytes == previous.payload_bytes:
            record.payload_bytes = previous.payload_bytes
        if record.min_version == previous.min_version:
            record.min_version = previous.min_version
        if record.max_version == previous.max_version:
            record.max_version = previous.max_version
        if record.push_time == previous.push_time:
            record.push_time = previous.push_time
        if record.fields == previous.fields:
            record.fields = previous.fields


def share_with_group(record: Record, row: GroupRow) -> None:
    """Put the numbers of its group in place of a record's own, where they are equal."""
    record.group_id = row.id
    if record.push_time == row.open_time:
        record.push_time = row.open_time
