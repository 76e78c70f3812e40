"""What comes again under a uid that is stored, with other bytes: whether it says the same.

Bytes are compared first, by their digests; content only of what is stored here and has others. Belongs
to one buffer and its event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from experience_buffer import errors
from experience_buffer_server.buffer.delivery.read_ahead import fetched
from experience_buffer_server.buffer.intake.same_content import difference, digest_of, digests_alike
from experience_buffer_server.buffer.state.buffer_state import BufferState
from experience_buffer_server.buffer.state.entries import Candidate, Entry
from experience_buffer_server.store.interface import OTHER_DIGEST, DamagedRecordError

_MAX_KNOWN: Final = 1024
"""Pairs that were compared and are remembered: a push that waits is looked at again and again."""


class Repeats:
    """Compares what comes again with what is stored. Not thread-safe."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self._known: OrderedDict[tuple[int, int, bytes], str] = OrderedDict()
        """By what is stored, as of which change, and what came: what differs; empty: nothing."""

    async def look(self, candidate: Candidate) -> bool:
        """Compare a candidate ahead, without waiting on the event loop; whether that took time."""
        entry = self._state.contents.by_uid(candidate.uid)
        if (
            entry is None
            or not entry.durable
            or entry.record.tombstone
            or candidate.tombstone
            or entry.record.digest == candidate.digest
            or _key(entry, candidate) in self._known
        ):
            return False
        async with fetched(self._state.store, self._state.id, [entry]):
            self.difference(entry, candidate)
        return True

    def difference(self, entry: Entry, candidate: Candidate) -> str:
        """What a candidate has otherwise than what is on the disk under its uid, in words; or empty."""
        if entry.record.tombstone or candidate.tombstone:
            return _of_tombstone(candidate)
        key = _key(entry, candidate)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._compared(entry, candidate)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return known

    def _compared(self, entry: Entry, candidate: Candidate) -> str:
        (stored,) = self._state.store.payloads(self._state.id, [candidate.uid])
        if stored is None or isinstance(stored, DamagedRecordError):
            return "what is stored can't be read back"
        try:
            # The digest stays that of what was pushed.
            is_other = bool(entry.record.fields & OTHER_DIGEST)
            annotated = is_other and digest_of(stored) != entry.record.digest
            return difference(stored, bytes(candidate.payload), annotated=annotated)
        except errors.TrxpError as error:
            return f"what is stored can't be read back: {error}"


def was_the_same(past: bytes, candidate: Candidate) -> bool:
    """Whether what was consumed, of which only the digest is known, is known to have been the same."""
    if past == candidate.digest or candidate.tombstone:
        return past == candidate.digest
    try:
        return past in digests_alike(bytes(candidate.payload))
    except errors.TrxpError:
        return False


def difference_of(first: Candidate, candidate: Candidate) -> str:
    """The same of two that came in one push."""
    if first.digest == candidate.digest:
        return ""
    if first.tombstone or candidate.tombstone:
        return _of_tombstone(candidate)
    return difference(bytes(first.payload), bytes(candidate.payload), annotated=False)


def _of_tombstone(candidate: Candidate) -> str:
    """Two have one digest: the other is none."""
    if candidate.tombstone:
        return "as an experience, and comes as a tombstone"
    return "as a tombstone, and comes as an experience"


def _key(entry: Entry, candidate: Candidate) -> tuple[int, int, bytes]:
    return entry.record.seq, entry.generation, candidate.digest
