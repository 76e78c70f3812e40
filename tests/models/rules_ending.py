"""Rules of how leases end: acknowledged, given back, expired, and ended again."""

from __future__ import annotations

from collections.abc import Callable

from tests.models import model_ranks
from tests.models.port import LONG_SECONDS, SHORT_SECONDS, Choose
from tests.models.rules_sampling import Sampling


class Ending(Sampling):
    def ack(self, choose: Choose) -> None:
        if (chosen := self.some_lease(choose)) is not None:
            self.ack_lease(chosen, choose)

    def ack_lease(self, lease_id: int, choose: Choose) -> None:
        step, rank = self.ack_arguments(lease_id, choose)
        num_experiences = self.num_experiences(lease_id)
        assert self.port.ack(lease_id, step, rank) == num_experiences
        self.acked(lease_id, step, rank)

    def num_experiences(self, lease_id: int) -> int:
        """How many it holds, those that are drawn again counted again."""
        lease = self.model.leases[lease_id]
        return len(self.model.experiences(lease.consumer, lease.units))

    def ack_arguments(self, lease_id: int, choose: Choose) -> tuple[int | None, int | None]:
        lease = self.model.leases[lease_id]
        safe = self.model.places[lease.consumer].safe
        self.step += choose.number(0, 1)
        low = max(self.step - 2, 0 if safe is None else safe + 1)
        steps = [None, low, max(low, self.step), max(low, self.step)]
        if safe is not None and model_ranks.reached(lease, safe):
            # Another rank was there before it became safe: the others may still follow.
            steps.append(safe)
        elif safe is not None and choose.number(0, 9) == 0:
            rank = 0 if lease.parts else None
            self.refused("FAILED_PRECONDITION", lambda: self.port.ack(lease_id, safe, rank))
        step = choose.one_of(steps)
        left = [rank for rank in range(len(lease.parts)) if rank not in lease.acked]
        return step, choose.one_of(left) if left else None

    def acked(self, lease_id: int, step: int | None, rank: int | None) -> None:
        if rank is None:
            self.model.ack(lease_id, step)
        else:
            model_ranks.ack(self.model, lease_id, step, rank)
        if lease_id not in self.model.leases:
            self.ended[lease_id] = "acked"

    def ack_all(self, choose: Choose) -> None:
        """A trainer's life: sample and acknowledge at the next step."""
        if not (names := [n for n in self.model.places if n != "ranks"]):
            return
        if (lease_id := self.sample_as_one(choose.one_of(names), choose)) is not None:
            self.ack_lease(lease_id, choose)

    def ranks_go_on(self, choose: Choose) -> None:
        """Ranks sample, acknowledge their parts, and ask for the next batch, each at its own pace."""
        if "ranks" not in self.model.places:
            return
        self.sample_as_rank(choose)
        if shared := self.model.leases_of("ranks"):
            self.ack_lease(min(shared), choose)
            self.sample_as_rank(choose)

    def nack(self, choose: Choose) -> None:
        if (lease_id := self.some_lease(choose)) is not None:
            assert self.port.nack(lease_id) == self.num_experiences(lease_id)
            self.end_lease(lease_id, "nacked")

    def end_again(self, choose: Choose) -> None:
        """An ended lease: the same end again changes nothing, another one is refused."""
        if not self.ended:
            return
        lease_id = choose.one_of(list(self.ended)[-5:])
        calls: dict[str, Callable[[], object]] = {
            "acked": lambda: self.port.ack(lease_id, None, None),
            "nacked": lambda: self.port.nack(lease_id),
        }
        for end, call in calls.items():
            if self.ended[lease_id] == end:
                call()
            else:
                self.refused("NOT_FOUND", call)

    def extend(self, choose: Choose) -> None:
        if (lease_id := self.some_lease(choose)) is not None:
            lease = self.model.leases[lease_id]
            deadline = self.port.extend(lease_id, choose.one_of([SHORT_SECONDS, LONG_SECONDS]))
            assert deadline >= lease.deadline - self.port.clock_error_seconds
            lease.deadline = deadline

    def expire(self, choose: Choose) -> None:
        """The shortest leases, as many as chosen, expire."""
        by_deadline = sorted(self.model.leases, key=lambda i: self.model.leases[i].deadline)
        due = by_deadline[: choose.number(1, 3)]
        if due:
            self.port.let_expire(due)
        for lease_id in due:
            self.end_lease(lease_id, "expired")

    def lapse(self, choose: Choose) -> None:
        """A delivery that nobody ends in time, where nothing else than waiting helps."""
        if not (names := [n for n in self.model.places if n != "ranks"]):
            return
        if (lease_id := self.sample_as_one(choose.one_of(names), choose, seconds=0.2)) is not None:
            self.port.let_expire([lease_id])
            self.end_lease(lease_id, "expired")
