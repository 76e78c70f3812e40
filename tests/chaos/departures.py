"""What the buffers let go by themselves, compared with what they held: evicted, or too old."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos import work
from tests.chaos.fates import NEVER, Fate

_CLOCK_SECONDS: Final = 0.5
"""A server takes an age by the wall clock of its start, the journals by one that can't be set."""


@dataclass(slots=True)
class Sighting:
    """What the buffers listed that let something go by themselves."""

    began: float
    ended: float
    uids: frozenset[str]


class Departures:
    """The experiences of one buffer that leave by themselves.

    Args:
        kind: Of the operations that push them.
        fates: Of all experiences, by uid.
        sightings: In the order of time.
    """

    def __init__(
        self, kind: work.Kind, fates: Mapping[str, Fate], sightings: Sequence[Sighting]
    ) -> None:
        self._fates = {
            name: fate
            for name, fate in fates.items()
            if fate.operation.kind == kind and fate.acked_time < NEVER
        }
        self._kind = kind
        self._sightings = sightings
        self.gone: dict[str, float] = {}
        """When each was first missed in a list."""

    def check(self) -> Iterator[str]:
        """Fill `gone`; what is wrong, in sentences."""
        for sighting in self._sightings:
            for name in sorted(self.gone.keys() & sighting.uids):
                yield f"{name}: listed after it had left"
            stored = [n for n, fate in self._fates.items() if fate.acked_time < sighting.began]
            missing = [name for name in stored if name not in sighting.uids]
            self.gone |= {name: sighting.ended for name in missing if name not in self.gone}
            yield from self._too_early(missing, stored, sighting)

    def _too_early(
        self, missing: Sequence[str], stored: Sequence[str], sighting: Sighting
    ) -> Iterator[str]:
        if self._kind == "fresh":
            oldest = sighting.ended - work.FRESH_SECONDS + _CLOCK_SECONDS
            for name in missing:
                if self._fates[name].asked_time > oldest:
                    yield f"{name}: acknowledged, lost, and not too old yet"
            return
        # Older ones in somebody's hands may have stayed instead of these.
        newest = sorted(stored, key=lambda name: (self._fates[name].acked_time, name))
        newest = newest[-work.REPLAY_ITEMS // 2 :]
        for name in newest:
            if name not in sighting.uids:
                yield f"{name}: acknowledged, lost, and too new for an eviction"
