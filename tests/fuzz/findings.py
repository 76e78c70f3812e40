"""Runs inputs of one target, notes what it finds, and goes on: one finding doesn't hide the next."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz import corpus
from tests.fuzz.meter import Meter, OverLimitError


@dataclass(slots=True)
class Report:
    """What came of the inputs of one target."""

    num_inputs: int = 0
    seconds: float = 0.0
    slowest_seconds: float = 0.0
    largest_bytes: int = 0
    num_edges: int = 0
    num_kept: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    """By place, the kept input and what went wrong with it first."""

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


class Watch:
    """One target under watch. Not thread-safe."""

    def __init__(self, target: str, meter: Meter, *, judge_limits: bool = True) -> None:
        self._target = target
        self._meter = meter
        self._judge_limits = judge_limits
        """False where the code is instrumented, which makes it ten times as slow."""
        self._started = time.monotonic()
        self.report = Report()

    def run(self, data: bytes) -> None:
        """Run one input; whatever the target lets out is noted."""
        try:
            self._meter(data)
        except OverLimitError as error:
            if self._judge_limits:
                self._note("a limit", data, error)
        except Exception as error:
            self._note(_place(error), data, error)

    def finished(self) -> Report:
        """The report up to now."""
        report, meter = self.report, self._meter
        report.num_inputs = meter.num_inputs
        report.seconds = time.monotonic() - self._started
        report.slowest_seconds = meter.slowest_seconds
        report.largest_bytes = meter.largest_bytes
        return report

    def _note(self, place: str, data: bytes, error: Exception) -> None:
        if place in self.report.findings:
            return
        path = corpus.save_finding(self._target, data)
        self.report.findings[place] = f"{path.name}: {type(error).__name__}: {str(error)[:300]}"
        sys.stderr.write(f"\n{place}\n{''.join(traceback.format_exception(error)[-5:])}")


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
