"""Everything that may happen to a buffer, played against a buffer and the model at once.

The rules don't know who chooses (hypothesis, or a seeded list of choices), nor whether the buffer is
an object here or a server elsewhere: a `Port` brings it. What a rule asserts by itself, without the
model, are the promises: whole groups, no unit in two leases, windows, what a rewind brings back.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence

from tests.models.model import SIZE
from tests.models.model_batch import may_insert
from tests.models.port import GATED_READERS, READERS, Choose, Item, LocalPort, Port
from tests.models.rules_delivery import Delivering, is_limited
from tests.unit.builders import uid


def key_of(task: int) -> str:
    return f"2/{task}"


class Player(Delivering):
    """Plays rules on a buffer and on the model."""

    # --- what comes and what is removed

    def push_group(self, choose: Choose) -> None:
        """A whole group in one push, sometimes with a tombstone, sometimes a member short."""
        self.num_tasks += 1
        task, low = self.num_tasks, self._version(choose)
        runs = range(choose.one_of([SIZE, SIZE, SIZE, SIZE - 1]))
        items = [(task, run, self._capped(low + choose.number(0, 1))) for run in runs]
        num_dead = choose.one_of([0, 0, 0, 0, 1, 2])
        dead = [(task, run, 0) for task, run, _ in items[:num_dead]]
        self._push(items[num_dead:], dead)

    def push_members(self, choose: Choose) -> None:
        """Members of several groups; some are there already, some come too late."""
        live: list[Item] = []
        dead: list[Item] = []
        for _ in range(choose.number(1, 3)):
            item, is_live = self.some_member(choose)
            (live if is_live else dead).append(item)
        self._push(list(dict.fromkeys(live)), list(dict.fromkeys(dead)))

    def some_member(self, choose: Choose) -> tuple[Item, bool]:
        """Of a recent group, or of the next one; whether it is alive."""
        task = choose.number(max(self.num_tasks - 2, 1), self.num_tasks + 1)
        run = choose.number(0, SIZE)
        item = (task, run, self._version(choose))
        self.num_tasks = max(self.num_tasks, task)
        is_live = bool(choose.number(0, 5))
        return self.pushed.get(uid(task, run), item) if is_live else (task, run, 0), is_live

    def _version(self, choose: Choose) -> int:
        return self._capped(max((self.model.published or 2) - choose.number(-1, 3), 0))

    def _capped(self, version: int) -> int:
        """Limiters don't count what is held for its version; there is none beside a limiter."""
        newest = 1 if self.model.published is None else self.model.published
        return min(version, newest) if self.is_limited() else version

    def _push(self, live: Sequence[Item], dead: Sequence[Item]) -> None:
        model = self.model
        known = {*model.past, *model.members()}
        new = [(uid(task, run), key_of(task), one) for one in (live, dead) for task, run, _ in one]
        seen: dict[str, tuple[str, bool]] = {}
        for name, key, one in new:
            if name not in known:
                seen.setdefault(name, (key, one is live))
        coming: Counter[str] = Counter()
        uids = []
        for name, (key, is_live) in seen.items():
            # What comes too late is refused for that, and takes nobody's place.
            if coming[key] < model.room(key):
                coming[key] += 1
                uids += [name] if is_live else []
        if not may_insert(model, uids, coming):
            # Refused exactly where a limiter's inequality would break: else this push goes.
            self.refused("RESOURCE_EXHAUSTED", lambda: self.port.push(live, dead))
            return
        self.pushed_now(live, dead, self.port.push(live, dead))
        model.settle()

    def pushed_now(self, live: Sequence[Item], dead: Sequence[Item], found: Sequence[str]) -> None:
        """Note what a push has answered."""
        model = self.model
        expected = [
            model.push(key_of(item[0]), uid(*item[:2]), dead=one is dead, version=item[2])
            for one in (live, dead)
            for item in one
        ]
        assert found == expected, (found, expected)
        for item, status in zip((*live, *dead), found, strict=True):
            if status == "stored":
                self.pushed[uid(*item[:2])] = item

    def seal(self, choose: Choose) -> None:
        key = key_of(choose.number(max(self.num_tasks - 3, 1), self.num_tasks + 1))
        group = self.model.groups.get(key)
        if group is None or group.closed == "dropped":
            status = "NOT_FOUND" if group is None else "FAILED_PRECONDITION"
            self.refused(status, lambda: self.port.seal(key))
            return
        self.port.seal(key)
        group.closed = group.closed or "sealed"
        self.model.settle()

    def drop(self, choose: Choose) -> None:
        key = key_of(choose.number(max(self.num_tasks - 4, 1), self.num_tasks + 1))
        group = self.model.groups.get(key)
        num_dropped = self.port.drop(key)
        assert num_dropped == (len(group.live) if group else 0)
        if group is None:
            self.model.past_groups.add(key)
        else:
            self.model.drop(group)

    def delete(self, choose: Choose) -> None:
        members = self.model.members()
        if not members:
            return
        newest = max(members, key=lambda uid: members[uid].number)
        # Often the one that was given the last number.
        member = members[choose.one_of([newest, choose.one_of(sorted(members))])]
        held = self.model.is_held(member)
        assert self.port.delete(member.uid) == (not held)
        if not held:
            self.model.delete(member)
            self.pushed.pop(member.uid)
            self.generations.pop(member.uid, None)

    # --- the training timeline

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

    # --- the end of a process

    def crash(self, choose: Choose) -> None:
        """Everything acknowledged holds."""
        self.port.crash()

    def crash_during(self, choose: Choose) -> None:
        """A call is on its way to the disk: afterwards it has happened, or it hasn't."""
        before = copy.deepcopy((self.model, self.ended))
        call = self._some_call(choose)
        if call is None:
            return
        self.port.crash_during(call, choose.number(0, 1))
        either = [self.port.expected(model) for model in (self.model, before[0])]
        if either[0] == either[1]:
            # Nobody can tell: the caller asks again, as it would.
            call(self.port)
        elif (observed := self.port.observed(*either)) != either[0]:
            wrong = [
                {k: (observed[k], v) for k, v in e.items() if observed[k] != v} for e in either
            ]
            assert not wrong[1], (
                f"observed, expected: neither after {wrong[0]} nor before {wrong[1]}"
            )
            self.model, self.ended = before

    def _some_call(self, choose: Choose) -> Callable[[Port], object] | None:
        """A call, already done on the model."""
        kind = choose.one_of(["ack", "nack", "rewind", "safe"])
        leases = [i for i, le in self.model.leases.items() if le.consumer != "narrow"]
        if kind in ("ack", "nack") and leases:
            lease_id = choose.one_of(sorted(leases))
            if kind == "nack":
                self.end_lease(lease_id, "nacked")
                return lambda port: port.nack(lease_id)
            step, rank = self.ack_arguments(lease_id, choose)
            self.acked(lease_id, step, rank)
            return lambda port: port.ack(lease_id, step, rank)
        name = choose.one_of(list(self.model.places))
        low = max(self.model.places[name].safe or 0, 0)
        step = choose.number(low, max(low, self.step))
        if kind == "rewind":
            self.ended |= dict.fromkeys(self.model.leases_of(name), "nacked")
            self.model.rewind(name, step)
            return lambda port: port.rewind(name, step)
        if kind == "safe":
            self.model.declare_safe(name, step)
            return lambda port: port.declare_safe(name, step)
        return None


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


class LocalPlayer(Player):
    """Plays on a buffer of this process: calls interleave, and time is told."""

    port: LocalPort

    def push_at_once(self, choose: Choose) -> None:
        """Two pushes on their way together, of the same members too, and of one member twice."""
        if self.is_limited():
            return
        pushes: list[tuple[list[Item], list[Item]]] = [([], []), ([], [])]
        for live, dead in pushes:
            for _ in range(choose.number(1, 5)):
                item, is_live = self.some_member(choose)
                (live if is_live else dead).append(item)
        for (live, dead), found in zip(pushes, self.port.push_at_once(pushes), strict=True):
            self.pushed_now(live, dead, found)
        self.model.settle()

    def overdue(self, choose: Choose) -> None:
        """So much time passes that every lease expires and every open group is closed."""
        self.port.let_groups_close()
        for lease_id in sorted(self.model.leases):
            self.end_lease(lease_id, "expired")
        self.model.close_overdue()
