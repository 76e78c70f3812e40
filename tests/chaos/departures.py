"""What the buffers let go by themselves, compared with what they held: evicted, or too old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.chaos import work
from tests.chaos.fates import Fate

_CLOCK_SECONDS: Final = 0.5
"""A server takes an age by the wall clock of its start, the journals by one that can't be set."""


@dataclass(slots=True)
class Sighting:
    """What the buffers listed that let something go by themselves."""

    began: float
    ended: float
    uids: frozenset[str]


def departures(
    kind: work.Kind, fates: Mapping[str, Fate], sightings: Sequence[Sighting]
) -> tuple[dict[str, float], list[str]]:
    """When each experience that left by itself was first missed in a list; what is wrong, in sentences.

    Args:
        kind: Of the operations that push them.
        fates: Of all experiences, by uid.
        sightings: In the order of time.
    """
    gone: dict[str, float] = {}
    problems: list[str] = []
    for sighting in sightings:
        stored = {
            name: fate
            for name, fate in fates.items()
            if fate.operation.kind == kind and fate.acked_time < sighting.began
        }
        missing = [name for name in stored if name not in sighting.uids]
        back = sorted(gone.keys() & sighting.uids)
        problems += [f"{name}: listed after it had left" for name in back]
        gone = dict.fromkeys(missing, sighting.ended) | gone
        if kind == "fresh":
            oldest = sighting.ended - work.FRESH_SECONDS + _CLOCK_SECONDS
            early = [name for name in missing if stored[name].asked_time > oldest]
            problems += [f"{name}: acknowledged, lost, and not too old yet" for name in early]
        else:
            newest = sorted(stored, key=lambda name: (stored[name].acked_time, name))
            # Older ones in somebody's hands may have stayed instead of these.
            early = [
                name for name in newest[-work.REPLAY_ITEMS // 2 :] if name not in sighting.uids
            ]
            problems += [
                f"{name}: acknowledged, lost, and too new for an eviction" for name in early
            ]
    return gone, problems
