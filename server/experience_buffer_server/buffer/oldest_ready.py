"""How long the oldest unit has been ready that a consumer can sample. Looks a little at a time.

Selectors order units by what is to go next, not by age: so the entries are walked through by arrival,
a bounded number with each look, which goes on where the last one has ended.
"""

from __future__ import annotations

from typing import Final

from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.consumers import Consumer
from experience_buffer_server.buffer.state.entries import Entry, key_of

_MAX_LOOKS: Final = 2000
"""At entries, per look: less than a millisecond."""
_ROUND_SECONDS: Final = 60.0
"""After which the walk begins anew: what came back from a lease may be older than where it is."""


class OldestReady:
    """For one consumer of one buffer. Not thread-safe."""

    def __init__(self) -> None:
        self._found: Entry | None = None
        self._last_seq = 0
        """Up to here nothing is ready, as of when it was looked at."""
        self._begin_time = 0.0

    def age_seconds(self, state: BufferState, consumer: Consumer, now: float) -> float:
        """Since the first member of the oldest ready unit was pushed; 0: none is ready, or was found yet."""
        if not len(consumer.ready):
            self._found, self._last_seq = None, 0
            return 0.0
        if now - self._begin_time >= _ROUND_SECONDS:
            self._begin_time, self._last_seq = now, 0
        if (found := self._look(state, consumer)) is not None:
            self._found = found
        elif self._found is not None and not _is_ready(consumer, self._found):
            self._found = None
        return 0.0 if self._found is None else max(now - self._found.record.push_time, 0.0)

    def _look(self, state: BufferState, consumer: Consumer) -> Entry | None:
        for number, entry in enumerate(state.contents.since(self._last_seq)):
            if number >= _MAX_LOOKS:
                return None
            if _is_ready(consumer, entry):
                return entry
            self._last_seq = entry.record.seq
        self._last_seq = 0
        return None


def _is_ready(consumer: Consumer, entry: Entry) -> bool:
    return key_of(consumer.settings, entry) in consumer.ready
