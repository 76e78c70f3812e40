"""Everything that may happen to a buffer's delivery, played against a buffer and the model at once.

The rules don't know who chooses (hypothesis, or a seeded list of choices), nor whether the buffer is
an object here or a server elsewhere: a `Port` brings it. What a rule asserts by itself, without the
model, are the promises: whole groups, no unit in two leases, windows, what a rewind brings back.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.models.port import Choose
from tests.models.rules_crashing import Crashing
from tests.models.rules_pushing import Pushing


class Player(Pushing, Crashing):
    """Plays rules on a buffer and on the model."""


RULES: dict[Callable[[Player, Choose], None], int] = {
    Player.push_group: 12,
    Player.push_members: 6,
    Player.seal: 3,
    Player.drop: 2,
    Player.delete: 3,
    Player.sample: 14,
    Player.ranks_go_on: 5,
    Player.ack: 8,
    Player.ack_all: 14,
    Player.nack: 4,
    Player.end_again: 3,
    Player.extend: 3,
    Player.rewind: 5,
    Player.declare_safe: 4,
    Player.release: 4,
    Player.publish: 4,
    Player.prioritize: 5,
    Player.change: 2,
}
"""What may happen, and how often compared with the others; besides the ways to die or to expire."""
