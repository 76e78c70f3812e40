"""Rules of the training timeline, of versions and priorities, of consumers that come and go."""

from __future__ import annotations

from tests.models.port import GATED_READERS, READERS, Choose
from tests.models.rules_base import Pair, is_limited
from tests.unit.builders import uid


class Changing(Pair):
    def rewind(self, choose: Choose) -> None:
        """Exactly what was acknowledged later, and what is leased, can be had again."""
        model, name = self.model, choose.one_of(list(self.model.places))
        place = model.places[name]
        if place.safe and choose.number(0, 9) == 0:
            before_it = place.safe - 1
            self.refused("FAILED_PRECONDITION", lambda: self.port.rewind(name, before_it))
        low = -1 if place.safe is None else place.safe
        step = choose.number(low, max(low, self.step))
        later = {
            u for u, acks in place.acks.items() if any(s > step for s in acks if s is not None)
        }
        leased = set(model.leased(name))
        returned = list(model.leases_of(name))
        before = model.available(name)
        # Before the rewind: what was dropped while it was leased leaves with the lease that returns.
        undone = model.experiences(name, later)
        found = self.port.rewind(name, step)
        model.rewind(name, step)
        assert found == (len(undone), len(returned))
        units = model.units(name)
        # Final acks among those that were undone may have been enough.
        gone = {u for u in later | leased if u not in units or place.consumed(u)}
        after = set(model.available(name)) - set(before)
        assert after == (later | leased) - set(before) - gone - place.quarantined
        self.ended |= dict.fromkeys(returned, "nacked")

    def declare_safe(self, choose: Choose) -> None:
        name = choose.one_of(list(self.model.places))
        step = choose.number(0, max(self.step - 1, 0))
        self.port.declare_safe(name, step)
        self.model.declare_safe(name, step)

    def release(self, choose: Choose) -> None:
        full = {n: p.quarantined for n, p in self.model.places.items() if p.quarantined}
        if not full:
            return
        name = choose.one_of(sorted(full))
        units = set(full[name]) if choose.number(0, 1) else {choose.one_of(sorted(full[name]))}
        uids = self.model.experiences(name, units)
        named = [] if units == full[name] else uids
        assert self.port.release(name, named) == len(units)
        self.model.places[name].release(units)

    # --- versions, priorities, settings

    def publish(self, choose: Choose) -> None:
        """The policy moves on, or back to an earlier checkpoint."""
        change = choose.one_of([1, 1, 1, -1, -2])
        change = 1 if self.is_limited() else change
        self.model.published = max((self.model.published or 1) + change, 0)
        self.port.publish(self.model.published)

    def prioritize(self, choose: Choose) -> None:
        members = {u: m for u, m in self.model.members().items() if not m.dead}
        if not members:
            return
        some = {choose.one_of(sorted(members)) for _ in range(choose.number(1, 3))}
        updates = [
            (one, float(choose.number(0, 3)), choose.one_of([0, self.generations.get(one, 0)]))
            for one in sorted(some)
        ]
        valid = self.port.prioritize([*updates, (uid(999, 0), 1.0, 0)])
        current = [u for u in updates if not u[2] or u[0] not in self.outdated]
        assert valid == (len(current), 1, len(updates) - len(current))
        for one, priority, _ in current:
            members[one].priority = priority
            self.outdated.add(one)

    def change(self, choose: Choose) -> None:
        """Consumers come and go."""
        possible = GATED_READERS if self.model.is_gated else READERS
        names = [n for n in possible if choose.number(0, 2) == 0] or ["trainer"]
        gone = {i for i, le in self.model.leases.items() if le.consumer not in names}
        readers = {name: READERS[name] for name in names}
        is_future = any(self._is_future(m.version) for m in self.model.members().values())
        limited = is_limited(readers.values())
        if limited and is_future:
            return
        self.port.change(readers)
        self.model.change(readers)
        self.ended |= dict.fromkeys(gone, "nacked")

    def _is_future(self, version: int) -> bool:
        return version > (1 if self.model.published is None else self.model.published)
