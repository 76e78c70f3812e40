"""Rules of what comes and what is removed: pushes, seals, drops, deletions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.models.model_limiter import may_insert
from tests.models.model_stock import SIZE
from tests.models.port import Choose, Item
from tests.models.rules_base import Pair, key_of
from tests.unit.builders import uid


class Pushing(Pair):
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
