"""Rules of delivery: what each consumer, or each of its ranks, gets next."""

from __future__ import annotations

from dataclasses import replace

from tests.models import model_ranks
from tests.models.model import Lease
from tests.models.model_batch import sample
from tests.models.model_limiter import counted, difference
from tests.models.port import LONG_SECONDS, SHORT_SECONDS, Choose, Delivered
from tests.models.rules_base import Pair


class Sampling(Pair):
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
        chosen = sample(model, name, wanted)
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
            num_stored = len(counted(model, name))
            assert num_stored >= limiter["min_size"]
            assert difference(model, name, num_stored) >= limiter["min_diff"]
        self.generations |= delivered.generations
        self.outdated -= set(delivered.generations)

    # --- ranks

    def sample_as_rank(self, choose: Choose) -> None:
        """One of the ranks asks; the batch is formed, or its part of an open one comes."""
        model, name = self.model, "ranks"
        shared = sorted(model.leases_of(name))
        world = model_ranks.world_size(model, name) or choose.number(2, 3)
        rank, wanted = choose.number(0, world - 1), choose.number(1, 4)
        if shared and choose.number(0, 9) == 0:
            wrong = (rank, world + 1, 0)
            self.refused(
                "FAILED_PRECONDITION", lambda: self.port.sample(name, wanted, LONG_SECONDS, wrong)
            )
            return
        after = choose.one_of([0, 0, *shared])
        due = model_ranks.due(model, name, rank, after)
        before = {u: [m.uid for m in ms] for u, ms in model.available(name).items()}
        delivered = self.port.sample(name, wanted, SHORT_SECONDS, (rank, world, after))
        if due is not None:
            assert delivered is not None
            assert delivered.lease_id == due
            assert delivered.units == model_ranks.part(model, model.leases[due], rank)
            return
        chosen = sample(model, name, wanted)
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
