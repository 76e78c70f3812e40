"""The raw figures of one run, and their medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.plan import SYSTEMS

TITLES = {system.name: system.title for system in SYSTEMS}
DURABLE = frozenset(system.name for system in SYSTEMS if system.durable)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half of the distance between the lowest and the highest, as a part of the median."""
        return (max(self.values) - min(self.values)) / 2 / max(self.median, 1e-9)


class Figures:
    """What a run found.

    Args:
        folder: Its results, with `raw.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        lines = (folder / "raw.jsonl").read_text().splitlines()
        self._records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    @property
    def header(self) -> dict[str, Any]:
        """Machine, versions, load at the start."""
        return next(record for record in self._records if record["case"] == "header")

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Rounds that failed."""
        return [record for record in self._records if record["case"] == "error"]

    @property
    def loads(self) -> list[float]:
        """Load averages before each round."""
        return [record["load"] for record in self._records if isinstance(record.get("load"), float)]

    @property
    def repetitions(self) -> int:
        """How often everything was measured."""
        return 1 + max(int(record.get("repetition", 0)) for record in self._records)

    def cases(self, case: str) -> list[tuple[str, str]]:
        """Systems and modes that have figures of a case, in the order they were measured."""
        return list(dict.fromkeys(self._modes(case)))

    def modes(self, system: str, case: str) -> list[str]:
        """Modes of one system that have figures of a case."""
        return [mode for name, mode in self.cases(case) if name == system]

    def rate(self, system: str, mode: str, case: str, size: str) -> Spread | None:
        """Experiences per second."""
        return self._spread("rate", system=system, mode=mode, case=case, size=size)

    def best(self, system: str, case: str, size: str) -> tuple[str, Spread] | None:
        """The fastest mode of a system."""
        found = [
            (mode, rate)
            for mode in self.modes(system, case)
            if (rate := self.rate(system, mode, case, size)) is not None
        ]
        return max(found, key=lambda pair: pair[1].median, default=None)

    def milliseconds(self, system: str, mode: str, case: str, percent: int) -> Spread | None:
        """A percentile of each repetition's latencies."""
        found = [
            statistics.quantiles(record["milliseconds"], n=100, method="inclusive")[percent - 1]
            for record in self._of(system=system, mode=mode, case=case)
            if len(record["milliseconds"]) > 1
        ]
        return Spread(tuple(found)) if found else None

    def cpu(self, system: str, mode: str, case: str, size: str) -> dict[str, float]:
        """CPU microseconds per experience by process, medians."""
        records = list(self._of(system=system, mode=mode, case=case, size=size))
        names = list(records[0]["cpu_us"]) if records else []
        return {
            name: statistics.median(record["cpu_us"][name] for record in records) for name in names
        }

    def limits(self) -> list[tuple[str, str, Spread]]:
        """Limits of the machine: name, unit, figure."""
        return [
            (case, unit, spread)
            for case, unit in dict.fromkeys(
                (record["case"], record["mode"]) for record in self._records if "value" in record
            )
            if (spread := self._spread("value", case=case, mode=unit)) is not None
        ]

    def limit(self, name: str) -> Spread | None:
        """One limit of the machine."""
        return next((spread for case, _, spread in self.limits() if case == name), None)

    def _modes(self, case: str) -> Iterator[tuple[str, str]]:
        for record in self._records:
            if record["case"] == case:
                yield record["system"], record["mode"]

    def _of(self, **keys: str) -> Iterator[dict[str, Any]]:
        for record in self._records:
            if all(record.get(key) == value for key, value in keys.items()):
                yield record

    def _spread(self, value: str, **keys: str) -> Spread | None:
        values: Sequence[float] = [record[value] for record in self._of(**keys)]
        return Spread(tuple(values)) if values else None
