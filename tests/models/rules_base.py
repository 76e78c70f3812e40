"""A buffer and its model, side by side, and what all rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.models.model import Model
from tests.models.model_place import Reader
from tests.models.port import READERS, Choose, Item, Port, Refused


def key_of(task: int) -> str:
    return f"2/{task}"


def is_limited(readers: Iterable[Reader]) -> bool:
    return any("limiter" in reader for reader in readers)


class Pair:
    """The two that a rule plays on."""

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
