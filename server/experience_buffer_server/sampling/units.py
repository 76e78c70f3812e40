"""What a consumer gets as one: a single experience or a whole group, while it is out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class Unit:
    """A unit that was taken to be delivered: `taken -> leased -> waiting again | gone`.

    While a unit waits it is nothing but a number in its consumer's selector.
    """

    key: int
    """Its number among the consumer's units: the seq of an item, the id of a group."""
    seqs: tuple[int, ...]
    """Its experiences, ascending."""
    num_bytes: int
    """Payload bytes of its experiences."""
    num_tokens: int
    """Response tokens of its experiences."""
    message_bytes: int = 0
    """Most that it takes in a message, computed advantages included."""
    num_deliveries: int = 0
    """Deliveries so far without an ack, the current one included."""
    times_sampled: int = 0
    """Deliveries that were acknowledged."""
    probability: float = 1.0
    """With which it was chosen."""
    lease_id: int = 0
    """The lease that holds it; 0: none yet."""
    gone: bool = False
    """Not to be delivered any more."""
    stale: bool = False
    """Too stale by the consumer's settings, and delivered marked."""
