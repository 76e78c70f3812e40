"""What is known of each experience of a run: pushed, acknowledged, removed, gone by itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.chaos import work
from tests.chaos.report import Counts
from tests.journal import events

NEVER: Final = math.inf
_CLOCK_SECONDS: Final = 0.5
"""A server takes an age by the wall clock of its start, the journals by one that can't be set."""


@dataclass(slots=True)
class Fate:
    """What the workers know of one experience."""

    operation: work.Operation
    run: int
    acked: bool = False
    """A push of it was answered: it is stored, or was before."""
    asked_time: float = NEVER
    """When its first push was begun."""
    acked_time: float = NEVER
    removed_time: float = NEVER
    """When the answer came that it was deleted, or its group dropped."""
    num_unanswered: int = 0
    """Deletions or drops that were begun: each may have been carried out."""

    @property
    def is_asked(self) -> bool:
        return self.asked_time < NEVER

    @property
    def may_be_removed(self) -> bool:
        """Whether it was deleted or dropped, or may have been."""
        return self.removed_time < NEVER or self.num_unanswered > 0


class Fates:
    """The fates of all experiences of one run, by uid.

    Args:
        folder: Where the journals are.
        seed: What the workers' operations are made from.
        counts: How much was compared; added to.
    """

    def __init__(self, folder: Path, seed: int, counts: Counts) -> None:
        self._folder = folder
        self._seed = seed
        self._counts = counts
        self.by_uid: dict[str, Fate] = {}
        self.problems: list[str] = []
        self._num_ends: Counter[str] = Counter()
        """How often a group's seal or drop was begun, by task."""

    def read(self, worker: int) -> None:
        for entry in events(self._folder / f"pusher-{worker}"):
            if "verb" not in entry:
                continue
            operation = work.operation(self._seed, worker, entry["index"])
            if entry["verb"] == "push":
                self._note_push(operation, entry)
            else:
                self._note_end(operation, entry)

    def _note_push(self, operation: work.Operation, entry: dict[str, Any]) -> None:
        for place, run in enumerate(work.RUNS[entry["part"]]):
            name = work.uid(operation.task, run)
            fate = self.by_uid.setdefault(name, Fate(operation, run))
            if entry["event"] == "calling":
                fate.asked_time = min(fate.asked_time, entry["time"])
                if operation.kind == "delete" and fate.may_be_removed:
                    fate.removed_time = NEVER  # It can be pushed anew.
                    fate.acked = False
                continue
            status = entry["result"][place]
            if problem := _wrong_status(status, fate):
                self.problems.append(f"{name}: {problem}")
            if status == "refused":
                continue
            self._counts.repeated_pushes += fate.acked
            self._counts.acked_experiences += not fate.acked
            fate.acked_time = min(fate.acked_time, entry["time"])
            fate.acked = True
        self._counts.acked_pushes += entry["event"] == "called"

    def _note_end(self, operation: work.Operation, entry: dict[str, Any]) -> None:
        verb, answered = entry["verb"], entry["event"] == "called"
        if verb != "delete":
            self._note_group_end(operation, entry)
        for run in operation.runs if verb != "seal" else ():
            fate = self.by_uid[work.uid(operation.task, run)]
            if not answered:
                fate.num_unanswered += 1
            elif verb == "drop" or entry["result"]:
                fate.removed_time = min(fate.removed_time, entry["time"])
                fate.num_unanswered = 0
            elif not entry["retried"]:
                # It spared what was leased or had been consumed, and has removed nothing.
                fate.num_unanswered -= 1
        if answered:
            self._counts.deletions += verb == "delete" and entry["result"]
            self._counts.drops += verb == "drop"

    def _note_group_end(self, operation: work.Operation, entry: dict[str, Any]) -> None:
        task = operation.task
        if entry["event"] == "calling":
            self._num_ends[task] += 1
        elif entry["result"] == "gone" and self._num_ends[task] == 1 and not entry["retried"]:
            # Of an earlier attempt that had no answer, this would be the trace.
            self.problems.append(f"group {operation.key}: gone before its {entry['verb']}")


def _wrong_status(status: str, fate: Fate) -> str:
    """What is wrong with the answer to a push; empty: nothing."""
    if fate.may_be_removed and (status != "refused" or fate.operation.kind == "dropped"):
        # A dropped group takes nobody any more; what may be deleted may be stored anew.
        dropped = fate.operation.kind == "dropped" and fate.removed_time < NEVER
        return "stored after its group was dropped" if dropped and status == "stored" else ""
    if status == "refused":
        return "its push was refused" + (" after it had been acknowledged" if fate.acked else "")
    if status == "stored" and fate.acked:
        return "stored by a push after it had been acknowledged before"
    return ""


# --- what leaves by itself: evicted, or too old


@dataclass(slots=True)
class Sighting:
    """What the buffers listed that let something go by themselves."""

    began: float
    ended: float
    uids: frozenset[str]


def departures(
    kind: work.Kind, fates: Mapping[str, Fate], sightings: Sequence[Sighting]
) -> tuple[dict[str, float], list[str]]:
    """When each that left by itself was first missed in a list; and what is wrong, in sentences.

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
