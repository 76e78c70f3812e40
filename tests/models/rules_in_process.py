"""Rules that only a buffer of this process can follow: calls that interleave, time that is told."""

from __future__ import annotations

from tests.models.port import Choose, Item, LocalPort
from tests.models.rules import Player


class LocalPlayer(Player):
    """Plays on a buffer of this process."""

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
