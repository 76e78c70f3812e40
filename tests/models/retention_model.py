"""What retention has to do to a buffer of single experiences with one consumer, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Place:
    """One experience."""

    push_time: float
    version: int | None
    is_leased: bool = False
    step: int | None = None
    """Of its ack, while that can be rewound."""
    was_rewound: bool = False
    is_gone: bool = False


@dataclass(slots=True)
class Model:
    """All experiences that were ever pushed, by uid."""

    max_age: float
    max_lag: int
    published: int = 2
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def present(self) -> set[str]:
        return {name for name, place in self.places.items() if not place.is_gone}

    @property
    def wanted(self) -> set[str]:
        """What the consumer hasn't consumed."""
        return {name for name in self.present if self.places[name].step is None}

    def leave(self, now: float) -> None:
        for place in self.places.values():
            lag = 0 if place.version is None else self.published - place.version
            due = now - place.push_time > self.max_age or lag > self.max_lag
            if due and not (place.is_leased or place.step is not None or place.was_rewound):
                place.is_gone = True

    def lend(self, uids: Iterable[str]) -> None:
        for name in uids:
            assert not self.places[name].is_gone
            self.places[name].is_leased = True

    def give_back(self, uids: Iterable[str]) -> None:
        for name in uids:
            self.places[name].is_leased = False

    def ack(self, uids: Iterable[str], step: int | None) -> None:
        for name in uids:
            place = self.places[name]
            place.is_leased, place.step, place.was_rewound = False, step, False
            place.is_gone = step is None

    def rewind(self, step: int) -> None:
        for place in self.places.values():
            place.is_leased = False
            if place.step is not None and place.step > step and not place.is_gone:
                place.step, place.was_rewound = None, True

    def declare_safe(self, step: int) -> None:
        for place in self.places.values():
            if place.step is not None and place.step <= step:
                place.is_gone = True
