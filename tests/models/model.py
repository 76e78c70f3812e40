"""What is stored, and who may have which unit: the model of a buffer.

A unit is a uid (of an item) or a group's key. Nothing here is durable or not: a crash changes nothing.
Below it: what a consumer has had (`model_place`). Above it: what makes the next batch (`model_batch`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.models.model_place import Place, Reader

SIZE = 3
"""Members that make a group whole."""


@dataclass(eq=False)
class Member:
    uid: str
    group: Group
    number: int
    dead: bool
    version: int
    priority: float = 1.0

    def unit_of(self, kind: str) -> str:
        return self.group.key if kind == "group" else self.uid


@dataclass(eq=False)
class Group:
    key: str
    number: int
    closed: str = ""
    was_whole: bool = False
    num_consumed: int = 0
    """Members that had left as consumed before it was closed."""

    members: list[Member] = field(default_factory=list)

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if not member.dead]

    @property
    def is_whole(self) -> bool:
        return self.closed not in ("", "dropped")


@dataclass(eq=False)
class Lease:
    consumer: str
    units: list[str]
    deadline: float
    parts: list[int]
    acked: dict[int, int | None] = field(default_factory=dict)


class Model:
    """Members come by `push`; a group that has none left goes with its tombstones."""

    def __init__(self, readers: dict[str, Reader], *, is_gated: bool = False) -> None:
        self.is_gated = is_gated
        """Single experiences, too, wait for their group: something is computed over it."""

        self.groups: dict[str, Group] = {}
        self.past: dict[str, tuple[bool, int]] = {}
        self.past_groups: set[str] = set()
        self.number = 0
        self.places = {name: Place(reader) for name, reader in readers.items()}
        self.removed: dict[str, Place] = {}
        self.leases: dict[int, Lease] = {}
        self.published: int | None = None

    # --- what there is

    def members(self) -> dict[str, Member]:
        return {m.uid: m for group in self.groups.values() for m in group.members}

    def units_of(self, kind: str) -> dict[str, list[Member]]:
        """All that can ever be had of what is stored, in the order of arrival."""
        groups = sorted(self.groups.values(), key=lambda group: group.number)
        if kind == "group":
            return {group.key: group.live for group in groups if group.is_whole and group.live}
        closed = [
            group for group in groups if group.is_whole or not (group.closed or self.is_gated)
        ]
        live = [m for group in closed for m in group.live]
        return {m.uid: [m] for m in sorted(live, key=lambda m: m.number)}

    def stored_of(self, kind: str) -> dict[str, list[Member]]:
        """The units with what is stored of them, also of dropped groups that somebody holds."""
        units: dict[str, list[Member]] = {}
        for member in self.members().values():
            if not member.dead:
                units.setdefault(member.unit_of(kind), []).append(member)
        return units

    # --- what comes and goes

    def push(self, key: str, uid: str, *, dead: bool, version: int) -> str:
        known = self.past | {m.uid: (m.dead, m.version) for m in self.members().values()}
        if uid in known:
            return "duplicate" if known[uid] == (dead, version) else "refused"
        if not self.room(key):
            return "refused"
        self.number += 1
        group = self.groups.setdefault(key, Group(key, self.number))
        group.members.append(Member(uid, group, self.number, dead, version))
        if len(group.members) + group.num_consumed == SIZE:
            group.closed = "whole"
        return "stored"

    def room(self, key: str) -> int:
        """How many members the group of a key takes; none when they come too late."""
        if key in self.past_groups:
            return 0
        group = self.groups.get(key)
        if group is None:
            return SIZE
        return 0 if group.closed else SIZE - len(group.members) - group.num_consumed

    def settle(self, reason: str = "consumed") -> None:
        """Let go what everybody has consumed for good, and what was dropped and isn't held."""
        for group in list(self.groups.values()):
            if group.closed == "dropped":
                self.leave([m for m in group.members if not self.is_held(m)], "dropped")
            done = [m for m in group.live if self.is_done(m)]
            group.num_consumed += 0 if group.closed else len(done)
            self.leave(done, reason)
            if _is_over(group):
                self.bury(group, remember=bool(group.closed))
        # What was dropped and isn't a consumer's any more doesn't count for it any more.
        dropped = [group for group in self.groups.values() if group.closed == "dropped"]
        for member in (member for group in dropped for member in group.live):
            for name, unit in self.units_with(member).items():
                place = self.places[name]
                is_its = place.consumed(unit) or unit in self.leased(name)
                if not is_its and unit not in place.given_up:
                    place.given_up.add(unit)
                    place.gone.append((self.times(name, unit), False))

    def leave(self, members: Iterable[Member], reason: str) -> None:
        for member in list(members):
            group = member.group
            group.members.remove(member)
            self.past |= {} if reason == "deleted" else {member.uid: (member.dead, member.version)}
            if not member.dead:
                self._left(member, {member.uid} if group.live else {member.uid, group.key}, reason)

    def bury(self, group: Group, *, remember: bool) -> None:
        """A group without experiences goes with its tombstones."""
        self.leave(group.members, "consumed" if remember else "deleted")
        del self.groups[group.key]
        self.past_groups |= {group.key} if remember else set()

    def drop(self, group: Group) -> None:
        group.was_whole = group.was_whole or group.is_whole
        group.closed = "dropped"
        self.settle()

    def close_overdue(self) -> None:
        """The deadline of every open group: what is there is used, where anything is."""
        for group in [group for group in self.groups.values() if not group.closed]:
            if group.live or group.num_consumed:
                group.closed = "deadline"
            else:
                self.drop(group)
        self.settle()

    def delete(self, member: Member) -> None:
        self.leave([member], "deleted")
        if _is_over(member.group):
            self.bury(member.group, remember=False)

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

    def was_rewound(self, member: Member, but_for: str = "") -> bool:
        units = self.units_with(member).items()
        return any(self.places[name].is_due(unit) for name, unit in units if name != but_for)

    def is_done(self, member: Member) -> bool:
        units = self.units_with(member).items()
        consumed = all(self.places[name].consumed(unit) for name, unit in units)
        return consumed and not self.may_return(member)

    def _left(self, member: Member, over: set[str], reason: str) -> None:
        """A live member has left; `over` are the units that ended with it."""
        for name, unit in self.units_with(member).items():
            times = self.times(name, unit)
            was_one = unit == member.uid or member.group.is_whole or times > 0
            if unit in over and was_one and unit not in self.places[name].given_up:
                was_used = reason == "consumed" or self.places[name].consumed(unit)
                self.places[name].gone.append((times, was_used))
        for place in (*self.places.values(), *self.removed.values()):
            place.forget(over)


def _is_over(group: Group) -> bool:
    """Nothing is left of a group that anybody could want, or that more could join."""
    return not group.live if group.closed else not (group.members or group.num_consumed)
