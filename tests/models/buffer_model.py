"""What a buffer must hold and offer, in the fewest words: the model of the stateful test."""

from __future__ import annotations

from dataclasses import dataclass, field

SIZE = 3
"""Members that make a group whole."""


@dataclass(eq=False)
class Member:
    uid: str
    seq: int
    dead: bool
    acked: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Group:
    key: str
    closed: str = ""
    members: list[Member] = field(default_factory=list)
    num_consumed: int = 0


@dataclass
class Model:
    """Groups by task; consumers by name with their unit; leases with their units."""

    gated: bool
    """Single experiences, too, wait for their group."""
    consumers: dict[str, str]
    groups: dict[str, Group] = field(default_factory=dict)
    past_uids: dict[str, bool] = field(default_factory=dict)
    past_groups: dict[str, str] = field(default_factory=dict)
    leases: dict[int, tuple[str, list[tuple[int, ...]]]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    last_seq: int = 0

    def push(self, key: str, uid: str, *, dead: bool) -> str:
        known = {m.uid: m.dead for m in self.members()} | self.past_uids
        if uid in known:
            return "duplicate" if known[uid] == dead else "refused"
        group = self.groups.get(key)
        if self.past_groups.get(key) if group is None else group.closed:
            return "refused"
        group = self.groups.setdefault(key, Group(key))
        self.last_seq += 1
        group.members.append(Member(uid, self.last_seq, dead))
        if len(group.members) + group.num_consumed == SIZE:
            self.close(group, "whole")
        return "stored"

    def close(self, group: Group, reason: str) -> None:
        group.closed = reason
        if reason == "dropped":
            self.leave(group, [m for m in group.members if not self.is_leased(m)])
        self.settle(group)

    def settle(self, group: Group, *, remember: bool = True) -> None:
        """Bury what is left of a group that has no experience any more."""
        if group.closed and all(m.dead for m in group.members):
            self.leave(group, group.members, remember=remember)
            del self.groups[group.key]
            if remember:
                self.past_groups[group.key] = group.closed
        elif not group.members and not group.num_consumed:
            del self.groups[group.key]

    def leave(self, group: Group, members: list[Member], *, remember: bool = True) -> None:
        if remember:
            self.past_uids |= {m.uid: m.dead for m in members}
        group.members = [m for m in group.members if m not in members]

    def members(self) -> list[Member]:
        return [m for group in self.groups.values() for m in group.members]

    def is_leased(self, member: Member) -> bool:
        """With a leased group its tombstones are out, too."""
        (group,) = [group for group in self.groups.values() if member in group.members]
        together = {m.seq for m in group.members}
        return any(
            not together.isdisjoint(unit) if self.consumers[name] == "group" else member.seq in unit
            for name, units in self.leases.values()
            for unit in units
        )

    def ready(self, consumer: str) -> list[tuple[int, ...]]:
        """Single experiences as they came; groups as their first members came, tombstones too."""
        units: list[tuple[int, ...]] = []
        for group in self.groups.values():
            votes = [m for m in group.members if not m.dead]
            if group.closed == "dropped" or (self.gated and not group.closed):
                continue
            if self.consumers[consumer] == "item":
                units += [(m.seq,) for m in votes if consumer not in m.acked]
            elif group.closed and any(consumer not in m.acked for m in votes):
                units.append(tuple(m.seq for m in votes))
        held = [
            seq for name, us in self.leases.values() if name == consumer for u in us for seq in u
        ]
        ready = [unit for unit in units if not set(unit) & set(held)]
        return sorted(ready) if self.consumers[consumer] == "item" else ready

    def end(self, lease_id: int, state: str) -> None:
        consumer, units = self.leases.pop(lease_id)
        self.ended[lease_id] = state
        seqs = {seq for unit in units for seq in unit}
        for group in list(self.groups.values()):
            touched = [m for m in group.members if m.seq in seqs]
            for member in touched:
                member.acked |= {consumer} if state == "acked" else set()
            if touched:
                self.retire(group)

    def retire(self, group: Group) -> None:
        done = [m for m in group.members if m.acked >= set(self.consumers)]
        group.num_consumed += 0 if group.closed else len(done)
        self.leave(group, done)
        if group.closed == "dropped":
            self.leave(group, [m for m in group.members if not self.is_leased(m)])
        self.settle(group)
