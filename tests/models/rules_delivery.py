"""Rules of delivery: what each consumer, or each of its ranks, gets next, and how leases end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from tests.models import model_batch
from tests.models.model import Lease, Model
from tests.models.model_place import Reader
from tests.models.port import (
    LONG_SECONDS,
    READERS,
    SHORT_SECONDS,
    Choose,
    Delivered,
    Item,
    Port,
    Refused,
)


def is_limited(readers: Iterable[Reader]) -> bool:
    return any("limiter" in reader for reader in readers)


class Delivering:
    """Plays on a buffer and its model, side by side."""

    def __init__(self, port: Port, names: Sequence[str], *, is_gated: bool = False) -> None:
        self.port = port
        self.model = Model({name: READERS[name] for name in names}, is_gated=is_gated)
        self.ended: dict[int, str] = {}
        """How leases have ended: acked, nacked or expired."""
        self.generations: dict[str, int] = {}
        self.outdated: set[str] = set()
        """Experiences whose priority was set since they were delivered."""
        self.pushed: dict[str, Item] = {}
        self.num_tasks = 0
        self.step = 0

    def check(self) -> None:
        """The buffer is as the model says."""
        expected = self.port.expected(self.model)
        observed = self.port.observed(expected)
        if observed != expected:
            wrong = {k: (observed[k], v) for k, v in expected.items() if observed[k] != v}
            raise AssertionError(f"observed, expected: {wrong}")

    def refused(self, status: str, call: Callable[[], object]) -> None:
        with pytest.raises(Refused) as caught:
            call()
        assert str(caught.value) == status

    def is_limited(self) -> bool:
        return is_limited(place.reader for place in self.model.places.values())

    def some_lease(self, choose: Choose) -> int | None:
        return choose.one_of(sorted(self.model.leases)) if self.model.leases else None

    def end_lease(self, lease_id: int, how: str) -> None:
        """One that its holder didn't acknowledge."""
        self.model.end(lease_id, blamed=True)
        self.ended[lease_id] = how

    # --- sampling

    def sample(self, choose: Choose) -> None:
        name = choose.one_of(list(self.model.places))
        if name == "ranks":
            self.sample_as_rank(choose)
        else:
            self.sample_as_one(name, choose)

    def sample_as_one(self, name: str, choose: Choose, seconds: float = 0.0) -> int | None:
        """Exactly the units that the model says, in its order; returns the lease."""
        model, wanted = self.model, choose.number(1, 3)
        before = {u: [m.uid for m in ms] for u, ms in model.available(name).items()}
        seconds = seconds or choose.one_of([SHORT_SECONDS, LONG_SECONDS])
        delivered = self.port.sample(name, wanted, seconds, None)
        chosen = model_batch.sample(model, name, wanted)
        if delivered is None:
            assert not chosen, f"{name} gets nothing, {chosen} may go"
            return None
        assert delivered.units == [before[unit] for unit in chosen]
        self.grant(name, delivered, chosen, parts=[])
        return delivered.lease_id

    def grant(self, name: str, delivered: Delivered, units: list[str], parts: list[int]) -> None:
        """Check the promises of a delivery in so many words, and note it."""
        model, reader = self.model, self.model.places[name].reader
        assert delivered.lease_id not in {*model.leases, *self.ended}
        out = set(model.leased(name))
        assert not out & set(units), "a unit is in two leases of a consumer"
        if reader["unit"] == "group":
            for group, members in zip(units, delivered.units, strict=False):
                live = [m.uid for m in model.groups[group].live]
                assert model.groups[group].closed
                assert members == live, "a group isn't whole"
        model.leases[delivered.lease_id] = Lease(name, list(units), delivered.deadline, parts)
        window = reader.get("max_leased_experiences")
        num_leased = len(model.experiences(name, model.leased(name)))
        assert not window or num_leased <= window or not out
        if limiter := reader.get("limiter"):
            num_stored = len(model_batch.counted(model, name))
            assert num_stored >= limiter["min_size"]
            assert model_batch.difference(model, name, num_stored) >= limiter["min_diff"]
        self.generations |= delivered.generations
        self.outdated -= set(delivered.generations)

    # --- ranks

    def sample_as_rank(self, choose: Choose) -> None:
        """One of the ranks asks; the batch is formed, or its part of an open one comes."""
        model, name = self.model, "ranks"
        shared = sorted(model.leases_of(name))
        world = model_batch.world_size(model, name) or choose.number(2, 3)
        rank, wanted = choose.number(0, world - 1), choose.number(1, 4)
        if shared and choose.number(0, 9) == 0:
            wrong = (rank, world + 1, 0)
            self.refused(
                "FAILED_PRECONDITION", lambda: self.port.sample(name, wanted, LONG_SECONDS, wrong)
            )
            return
        after = choose.one_of([0, 0, *shared])
        due = model_batch.due_to_rank(model, name, rank, after)
        before = {u: [m.uid for m in ms] for u, ms in model.available(name).items()}
        delivered = self.port.sample(name, wanted, SHORT_SECONDS, (rank, world, after))
        if due is not None:
            assert delivered is not None
            assert delivered.lease_id == due
            assert delivered.units == model_batch.part_of_rank(model, model.leases[due], rank)
            return
        chosen = model_batch.sample(model, name, wanted)
        if delivered is None:
            assert not chosen
            return
        parts = self._parts(name, delivered, rank, world, wanted)
        units_of = {tuple(uids): unit for unit, uids in before.items()}
        ordered = [units_of[tuple(uids)] for part in parts for uids in part]
        assert sorted(ordered) == sorted(chosen), "ranks share a group, or lack one"
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        together = replace(delivered, units=[uids for part in parts for uids in part])
        self.grant(name, together, ordered, sizes)

    def _parts(
        self, name: str, delivered: Delivered, rank: int, world: int, wanted: int
    ) -> list[list[list[str]]]:
        """What every one of the ranks gets of a new batch."""
        parts = []
        for other in range(world):
            following = (other, world, delivered.lease_id - 1)
            part = self.port.sample(name, wanted, SHORT_SECONDS, following)
            assert part is not None
            assert part.lease_id == delivered.lease_id
            parts.append(part.units)
        assert parts[rank] == delivered.units
        return parts

    # --- the ends of leases

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
        if safe is not None and model_batch.reached(lease, safe):
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
            model_batch.ack_as_rank(self.model, lease_id, step, rank)
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
