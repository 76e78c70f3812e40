"""What the workers and trainers of a run wrote down, compared with what was promised.

A finding is one sentence with the experience or lease in it; `Counts` says how much was compared.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import work
from tests.chaos.fates import NEVER, Fate, Fates, Sighting, departures
from tests.chaos.learner import load_checkpoint
from tests.chaos.report import Counts
from tests.journal import events

_TOLERANCE = 1e-5


@dataclass(slots=True)
class Delivery:
    """One lease as its trainer saw it."""

    asked: float
    time: float
    items: list[tuple[str, str, float | None, int]]
    end: str = ""


@dataclass
class Audit:
    """Compares the journals of one run.

    Args:
        folder: Where they are.
        seed: What the workers' operations are made from.
        num_workers: How many they were.
    """

    folder: Path
    seed: int
    num_workers: int
    sightings: list[Sighting] = field(default_factory=list)
    """What the buffers held at times that let something go by themselves."""
    problems: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    _fates: dict[str, Fate] = field(default_factory=dict)

    def check(self, left: frozenset[str] | None) -> None:
        """Fill `problems` and `counts`.

        Args:
            left: What was still stored in the end, once the trainers had had the time to consume
                everything; None: the run ended before, and nothing can be called lost.
        """
        fates = Fates(self.folder, self.seed, self.counts)
        for worker in range(self.num_workers):
            fates.read(worker)
        self._fates = fates.by_uid
        self.problems += fates.problems
        histories = self._read_deliveries()
        for (buffer, consumer), by_uid in histories.items():
            rewinds = self._rewinds() if buffer == "steps" else []
            for uid in by_uid.keys() & self._fates.keys():
                history = by_uid[uid]
                self._check_history(f"{buffer}/{consumer}", uid, history, rewinds)
        self._check_departures(histories)
        if left is not None:
            self._check_nothing_lost(histories, left)
            self._check_learner()

    def _fail(self, text: str) -> None:
        self.problems.append(text)

    # --- deliveries

    def _read_deliveries(self) -> dict[tuple[str, str], dict[str, list[Delivery]]]:
        leases: dict[tuple[str, int], Delivery] = {}
        histories: dict[tuple[str, str], dict[str, list[Delivery]]] = {}
        journals = sorted(self.folder.glob("trainer-*-*"))
        for path in [*journals, self.folder / "learner"]:
            for entry in events(path):
                if "lease" not in entry:
                    continue
                place = (entry["buffer"], entry["lease"])
                if entry["event"] == "leased":
                    # The ranks of a learner that begins anew may get their batch once more.
                    if place in leases and entry["buffer"] != "steps":
                        self._fail(f"lease {place}: given twice")
                    leases[place] = Delivery(entry["asked"], entry["time"], entry["items"])
                    consumer = histories.setdefault((entry["buffer"], entry["consumer"]), {})
                    self._check_batch(entry, leases[place])
                    for name in {item[0] for item in entry["items"]}:
                        consumer.setdefault(name, []).append(leases[place])
                else:
                    self._note_settled(place, leases.get(place), entry)
        for by_uid in histories.values():
            for history in by_uid.values():
                history.sort(key=lambda one: one.time)
        self.counts.leases += len(leases)
        return histories

    def _note_settled(
        self, place: tuple[str, int], delivery: Delivery | None, entry: dict[str, Any]
    ) -> None:
        if delivery is None:
            self._fail(f"lease {place}: settled and never given")
        elif entry["event"].startswith("reack") or entry.get("verb") == "reack":
            self.counts.repeated_acks += entry["event"] == "reacked"
            if entry["event"] == "lost":
                self._fail(f"lease {place}: its answered ack is forgotten: {entry['details']}")
        else:
            if entry["event"] == "lost" and entry["time"] < delivery.asked + work.LEASE_SECONDS:
                self._fail(f"lease {place}: ended before its time: {entry['details']}")
            self.counts.acks += entry["event"] == "acked"
            delivery.end = entry["event"]

    def _check_batch(self, entry: dict[str, Any], delivery: Delivery) -> None:
        groups: dict[str, list[str]] = defaultdict(list)
        for name, key, advantage, found in delivery.items:
            self.counts.deliveries += 1
            fate = self._fates.get(name)
            if fate is None or not fate.is_asked:
                self._fail(f"{name}: delivered and never pushed")
                continue
            if fate.operation.buffer != entry["buffer"]:
                self._fail(f"{name}: delivered from {entry['buffer']}")
            self.counts.large_deliveries += work.is_large(fate.operation.variant)
            self._check_content(name, fate, key, advantage, found)
            if name in groups[key]:
                self._fail(f"{name}: twice in lease {entry['lease']}")
            groups[key].append(name)
        if entry["consumer"] in ("actor", "learner"):
            for key, names in groups.items():
                self._check_whole(key, names)

    def _check_content(
        self, name: str, fate: Fate, key: str, advantage: float | None, found: int
    ) -> None:
        operation = fate.operation
        if found != checksum(operation, fate.run):
            self._fail(f"{name}: its payload has changed")
        if operation.buffer in ("groups", "steps") and key != operation.key:
            self._fail(f"{name}: delivered with group {key}")
        if operation.buffer != "groups":
            return
        expected = advantages(operation)[fate.run]
        self.counts.advantages += 1
        if advantage is None or abs(advantage - expected) > _TOLERANCE:
            self._fail(f"{name}: advantage {advantage}, expected {expected}")

    def _check_whole(self, key: str, names: Sequence[str]) -> None:
        operation = self._fates[names[0]].operation
        expected = {work.uid(operation.task, run) for run in operation.runs}
        self.counts.whole_groups += 1
        if set(names) != expected:
            self._fail(f"group {key}: delivered with {sorted(names)}")

    def _check_history(
        self, reader: str, name: str, history: Sequence[Delivery], rewinds: Sequence[float]
    ) -> None:
        fate = self._fates[name]
        keeps = reader.endswith("/sampler")  # A replay consumer gets the same again.
        if history[-1].asked > fate.removed_time:
            self._fail(f"{name}: delivered to {reader} after it was removed")
        if fate.operation.kind == "dropped" and fate.removed_time < NEVER:
            self._fail(f"{name}: delivered to {reader}, and its group was never whole")
        for before, after in itertools.pairwise(history):
            self.counts.redeliveries += 1
            if any(before.time <= moment <= after.time for moment in rewinds):
                continue
            if before.end == "acked" and not keeps:
                self._fail(f"{name}: delivered to {reader} again after its answered ack")
            given_back = before.end in ("nacking", "nacked", "acked")
            expired = after.time >= before.asked + work.LEASE_SECONDS
            unknown_ack = before.end == "acking" and keeps
            if not (given_back or expired or unknown_ack):
                self._fail(f"{name}: two leases at once for {reader}")

    # --- in the end

    def _check_nothing_lost(
        self, histories: dict[tuple[str, str], dict[str, list[Delivery]]], left: frozenset[str]
    ) -> None:
        readers = {"queue": ("trainer",), "groups": ("actor", "critic"), "steps": ("learner",)}
        for name, fate in self._fates.items():
            if not fate.acked or fate.may_be_removed or name in left:
                continue
            for consumer in readers.get(fate.operation.buffer, ()):
                history = histories.get((fate.operation.buffer, consumer), {}).get(name, [])
                if not history:
                    self._fail(f"{name}: acknowledged, and lost before {consumer} got it")
                elif consumer != "learner" and history[-1].end not in ("acked", "acking"):
                    self._fail(f"{name}: {consumer} never consumed it, and it is gone")

    def _check_departures(
        self, histories: dict[tuple[str, str], dict[str, list[Delivery]]]
    ) -> None:
        """What has left by itself stays away, and nothing left before its time."""
        kinds: tuple[work.Kind, ...] = ("replay", "fresh")
        for kind in kinds:
            gone, problems = departures(kind, self._fates, self.sightings)
            self.problems += problems
            for name, history in histories.get((kind, "sampler"), {}).items():
                if history[-1].asked > gone.get(name, NEVER):
                    self._fail(f"{name}: delivered after it had left {kind}")
            if kind == "replay":
                self.counts.evictions += len(gone)
            else:
                self.counts.aged += len(gone)

    def _rewinds(self) -> list[float]:
        rewinds = [e["time"] for e in events(self.folder / "learner") if e["event"] == "rewinding"]
        self.counts.rewinds += len(rewinds)
        return rewinds

    def _check_learner(self) -> None:
        """The learner was trained on each group once."""
        state = load_checkpoint(self.folder / "checkpoint")
        self.counts.steps += state["step"] + 1
        trained = list(itertools.chain.from_iterable(state["groups"]))
        expected = {
            fate.operation.key
            for fate in self._fates.values()
            if fate.operation.kind == "steps" and fate.acked
        }
        for key in sorted({key for key in trained if trained.count(key) > 1}):
            self._fail(f"group {key}: in the learner's checkpoint {trained.count(key)} times")
        for key in sorted(expected - set(trained)):
            self._fail(f"group {key}: acknowledged, and the learner was never trained on it")


# --- what a delivery must carry, worked out apart from the server


@functools.lru_cache(maxsize=10_000)
def checksum(operation: work.Operation, run: int) -> int:
    """Of the payload of one experience as it was pushed."""
    return zlib.crc32(work.member(operation.task, operation.variant, run))


def advantages(operation: work.Operation) -> dict[int, float]:
    """The advantage of each member of a group by run: (reward - mean) / (deviation + 1e-6).

    Source: Shao et al. 2024 (GRPO), outcome supervision, with the sample deviation.
    """
    rewards = {run: work.reward(operation.variant, run) for run in operation.runs}
    mean = math.fsum(rewards.values()) / len(rewards)
    variance = math.fsum((one - mean) ** 2 for one in rewards.values()) / (len(rewards) - 1)
    return {run: (one - mean) / (math.sqrt(variance) + 1e-6) for run, one in rewards.items()}
