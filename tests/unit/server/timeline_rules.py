"""Everything that may happen to a buffer's delivery, played against a buffer and the model at once.

The rules don't know who chooses (hypothesis, or a seeded list of choices), nor whether the buffer is
an object here or a server elsewhere: a `Port` brings it. What a rule asserts by itself, without the
model, are the promises: whole groups, no unit in two leases, windows, what a rewind brings back.
"""

from __future__ import annotations

from tests.unit.server.rules_crashing import Crashing
from tests.unit.server.rules_pushing import Pushing


class Player(Pushing, Crashing):
    """Plays rules on a buffer and on the model."""
