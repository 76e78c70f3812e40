"""Who may have which unit: the model of delivery.

A unit is a uid (of an item) or a group's key. Nothing here is durable or not: a crash changes nothing.
Below it: what is stored (`model_stock`), what a consumer has had (`model_place`). Beside it: what
limiters count (`model_limiter`), what makes the next batch (`model_batch`), whose part of a shared one
is whose (`model_ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.models.model_place import Place, Reader
from tests.models.model_stock import Member, Stock


@dataclass(eq=False)
class Lease:
    consumer: str
    units: list[str]
    deadline: float
    parts: list[int]
    acked: dict[int, int | None] = field(default_factory=dict)


class Model(Stock):
    def __init__(self, readers: dict[str, Reader], *, is_gated: bool = False) -> None:
        super().__init__(is_gated=is_gated)
        self.places = {name: Place(reader) for name, reader in readers.items()}
        self.removed: dict[str, Place] = {}
        self.leases: dict[int, Lease] = {}
        self.published: int | None = None

    # --- where a unit is: available, leased, quarantined or consumed

    def leases_of(self, name: str) -> dict[int, Lease]:
        return {i: lease for i, lease in self.leases.items() if lease.consumer == name}

    def leased(self, name: str) -> list[str]:
        return [unit for lease in self.leases_of(name).values() for unit in lease.units]

    def available(self, name: str) -> dict[str, list[Member]]:
        place, leased = self.places[name], self.leased(name)
        out = {*leased, *place.quarantined}
        units = self.units(name).items()
        return {u: ms for u, ms in units if u not in out and not place.consumed(u)}

    def times(self, name: str, unit: str) -> int:
        """How often a consumer had a unit, or has it."""
        place = self.places[name]
        return len(place.acks.get(unit, ())) + self.leased(name).count(unit)

    def units(self, name: str) -> dict[str, list[Member]]:
        return self.units_of(self.places[name].reader["unit"])

    def stored(self, name: str) -> dict[str, list[Member]]:
        return self.stored_of(self.places[name].reader["unit"])

    def experiences(self, name: str, units: Iterable[str]) -> list[str]:
        stored = self.stored(name)
        return [m.uid for unit in units for m in stored.get(unit, ())]

    # --- what consumers do

    def ack(self, lease_id: int, step: int | None) -> None:
        lease = self.leases.pop(lease_id)
        self.places[lease.consumer].ack(lease.units, step)
        self.settle()

    def end(self, lease_id: int, *, blamed: bool) -> None:
        """A lease ends without an ack: all of it can be had again, what isn't tried too often."""
        lease = self.leases.pop(lease_id)
        if blamed:
            units = set(lease.units) & set(self.units(lease.consumer))
            self.places[lease.consumer].blame(units)
        self.settle()

    def rewind(self, name: str, step: int) -> None:
        """Acks after the step never were, and nothing is leased."""
        self.places[name].rewind(step)
        for lease_id in self.leases_of(name):
            self.end(lease_id, blamed=False)

    def declare_safe(self, name: str, step: int) -> None:
        self.places[name].declare_safe(step)
        self.settle()

    def change(self, readers: dict[str, Reader]) -> None:
        """A consumer that goes gives back its leases; what it has consumed stays known."""
        going = set(self.places) - set(readers)
        for lease_id in [i for name in going for i in self.leases_of(name)]:
            self.end(lease_id, blamed=False)
        for name in going:
            self.removed[name] = self.places.pop(name).after_removal()
        # In one order, whatever strings hash to: the rules choose among the places by their numbers.
        for name in [name for name in readers if name not in self.places]:
            self.places[name] = self.removed.pop(name, Place(readers[name]))
        self.settle("dropped")

    # --- what leaves

    def units_with(self, member: Member) -> dict[str, str]:
        """By consumer, the unit that a member belongs to."""
        places = self.places.items()
        return {name: member.unit_of(place.reader["unit"]) for name, place in places}

    def is_held(self, member: Member) -> bool:
        return any(unit in self.leased(name) for name, unit in self.units_with(member).items())

    def may_return(self, member: Member) -> bool:
        units = self.units_with(member).items()
        return any(self.places[name].retained(unit) for name, unit in units)

    def was_rewound(self, member: Member, but_for: str) -> bool:
        units = self.units_with(member).items()
        return any(self.places[name].is_due(unit) for name, unit in units if name != but_for)

    def is_done(self, member: Member) -> bool:
        units = self.units_with(member).items()
        consumed = all(self.places[name].consumed(unit) for name, unit in units)
        return consumed and not self.may_return(member)

    def settle(self, reason: str = "consumed") -> None:
        """What was dropped and isn't a consumer's any more doesn't count for it any more."""
        super().settle(reason)
        dropped = [group for group in self.groups.values() if group.closed == "dropped"]
        for member in (member for group in dropped for member in group.live):
            for name, unit in self.units_with(member).items():
                place = self.places[name]
                is_its = place.consumed(unit) or unit in self.leased(name)
                if not is_its and unit not in place.given_up:
                    place.given_up.add(unit)
                    place.gone.append((self.times(name, unit), False))

    def left(self, member: Member, over: set[str], reason: str) -> None:
        for name, unit in self.units_with(member).items():
            times = self.times(name, unit)
            was_one = unit == member.uid or member.group.is_whole or times > 0
            if unit in over and was_one and unit not in self.places[name].given_up:
                was_used = reason == "consumed" or self.places[name].consumed(unit)
                self.places[name].gone.append((times, was_used))
        for place in (*self.places.values(), *self.removed.values()):
            place.forget(over)
