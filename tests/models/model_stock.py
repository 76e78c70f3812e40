"""What is stored, member by member, and what is remembered of what has left. Knows no consumers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

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


class Stock(ABC):
    """Members come by `push`; a group that has none left goes with its tombstones."""

    def __init__(self, *, is_gated: bool) -> None:
        self.is_gated = is_gated
        """Single experiences, too, wait for their group: something is computed over it."""

        self.groups: dict[str, Group] = {}
        self.past: dict[str, tuple[bool, int]] = {}
        self.past_groups: set[str] = set()
        self.number = 0

    @abstractmethod
    def is_held(self, member: Member) -> bool:
        """Whether somebody has it now."""

    @abstractmethod
    def is_done(self, member: Member) -> bool:
        """Whether nobody will ever want it again."""

    @abstractmethod
    def left(self, member: Member, over: set[str], reason: str) -> None:
        """A live member has left; `over` are the units that ended with it."""

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

    def leave(self, members: Iterable[Member], reason: str) -> None:
        for member in list(members):
            group = member.group
            group.members.remove(member)
            self.past |= {} if reason == "deleted" else {member.uid: (member.dead, member.version)}
            if not member.dead:
                self.left(member, {member.uid} if group.live else {member.uid, group.key}, reason)

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


def _is_over(group: Group) -> bool:
    """Nothing is left of a group that anybody could want, or that more could join."""
    return not group.live if group.closed else not (group.members or group.num_consumed)
