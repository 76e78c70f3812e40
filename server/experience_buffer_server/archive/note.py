"""What is noted of experiences when they leave: why, when, by whose ack. The same for all of a batch."""

from __future__ import annotations

from typing import NamedTuple

import msgpack


class Note(NamedTuple):
    """How experiences have left, as it is stored with each."""

    reason: str
    """"consumed", "deleted", "refused", or as drops are counted."""
    message: str
    """More about it, in words; empty where there is nothing to say."""
    time: float
    """Seconds since the Unix epoch."""
    consumer: str
    """Whose ack let them leave; empty: none did at once."""
    step: int | None
    """Its training step."""
    group_by: str
    """The buffer's: which key of theirs was that of their group."""
    policy_version: int | None
    """The one published then."""

    def encode(self) -> bytes:
        """As it is stored."""
        packed: bytes = msgpack.packb(tuple(self))
        return packed

    @classmethod
    def decode(cls, value: bytes) -> Note:
        """Read it back; later versions may have said more.

        Raises:
            ValueError: It isn't one.
            TypeError: The same.
        """
        return cls(*msgpack.unpackb(value)[: len(cls._fields)])
