"""What the rules of delivery need of a buffer, of who chooses, and the consumers that may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tests.models.model import Model
from tests.models.model_place import Reader

T = TypeVar("T")
Item = tuple[int, int, int]
"""Task, run and policy version of an experience."""

READERS: dict[str, Reader] = {
    "trainer": {"unit": "group"},
    "queue": {"unit": "item"},
    "ranks": {"unit": "group", "max_deliveries": 3},
    "replay": {
        "unit": "item",
        "replay": True,
        "max_times_sampled": 2,
        "selector": {"kind": "max", "key": "priority"},
    },
    "echo": {
        "unit": "group",
        "replay": True,
        "with_replacement": True,
        "max_times_sampled": 3,
        "limiter": {"min_size": 1, "samples_per_insert": 2, "min_diff": 0, "max_diff": 11},
    },
    "paced": {
        "unit": "item",
        "limiter": {"min_size": 2, "samples_per_insert": 1, "min_diff": 1, "max_diff": 13},
    },
    "careful": {"unit": "item", "max_deliveries": 2},
    "fresh": {"unit": "group", "staleness": {"max_lag": 1, "on_stale": "drop"}},
    "picky": {"unit": "item", "staleness": {"max_lag": 2, "on_stale": "drop"}},
    "patient": {
        "unit": "item",
        "replay": True,
        "max_times_sampled": 2,
        "staleness": {"max_lag": 1, "on_stale": "keep"},
        "limiter": {"min_size": 1, "samples_per_insert": 2, "min_diff": 0, "max_diff": 23},
    },
    "narrow": {"unit": "group", "max_leased_experiences": 5, "retain_steps": 2},
}
"""The consumers that a history may have."""
GATED_READERS = {name: reader for name, reader in READERS.items() if "limiter" not in reader}
"""Those of a buffer that computes over groups; what limiters count there is for tests of their own."""
SHORT_SECONDS, LONG_SECONDS = 100.0, 5000.0
"""How long leases are asked for."""


class Refused(Exception):
    """A call was refused; the text is its status, as on the wire."""


class Choose(Protocol):
    """Who decides what happens."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def number(self, low: int, high: int) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """One delivery, or a rank's part of one; the experiences unit by unit."""

    lease_id: int
    units: list[list[str]]
    deadline: float
    """Seconds since the Unix epoch."""
    generations: dict[str, int]


class Port(Protocol):
    """A buffer to be driven. Verbs raise `Refused`."""

    clock_error_seconds: float
    """How exactly it tells deadlines."""

    def push(self, live: Sequence[Item], dead: Sequence[Item]) -> list[str]: ...
    def seal(self, key: str) -> None: ...
    def drop(self, key: str) -> int: ...
    def sample(
        self, name: str, wanted: int, seconds: float, rank_of: tuple[int, int, int] | None
    ) -> Delivered | None:
        """What there is now."""

    def ack(self, lease_id: int, step: int | None, rank: int | None) -> int:
        """The experiences of the lease."""

    def nack(self, lease_id: int) -> int:
        """The experiences of the lease."""

    def extend(self, lease_id: int, seconds: float) -> float:
        """The new deadline."""

    def rewind(self, name: str, step: int) -> tuple[int, int]:
        """Experiences and leases that came back."""

    def declare_safe(self, name: str, step: int) -> None: ...
    def release(self, name: str, uids: Sequence[str]) -> int:
        """Units that were quarantined."""

    def prioritize(self, updates: Sequence[tuple[str, float, int]]) -> tuple[int, int, int]:
        """Numbers of those updated, unknown and outdated."""

    def delete(self, uid: str) -> bool:
        """False where somebody holds it."""

    def publish(self, version: int) -> None: ...
    def change(self, readers: dict[str, Reader]) -> None: ...
    def crash(self) -> None: ...
    def crash_during(self, call: Callable[[Port], object], num_commits: int) -> None: ...
    def let_expire(self, lease_ids: Sequence[int]) -> None:
        """Let time pass until these leases have expired."""

    def observed(self, *expected: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides what is delivered, once it is as expected."""

    def expected(self, model: Model) -> dict[str, Any]:
        """What `observed` finds where the model is right."""


class LocalPort(Port, Protocol):
    """A buffer of this process: time passes and calls interleave as told."""

    def push_at_once(
        self, pushes: Sequence[tuple[Sequence[Item], Sequence[Item]]]
    ) -> list[list[str]]:
        """Push in several calls, none of which waits for another one."""

    def let_groups_close(self) -> None:
        """Let time pass until every group's deadline is over; leases expire before."""
