"""Runs inputs of one target, notes what it finds, and goes on: one finding doesn't hide the next."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz import corpus
from tests.fuzz.decoders import make_target
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


class Watch:
    """One target under watch. Not thread-safe.

    Args:
        target: Its name.
        path: Where the report goes.
        judge_limits: False where the code is instrumented, which makes it ten times as slow.
    """

    def __init__(self, target: str, path: Path, *, judge_limits: bool = True) -> None:
        self._target = target
        self._path = path
        self._judge_limits = judge_limits
        self._meter = Meter(make_target(target))
        self._started = time.monotonic()
        self._findings: dict[str, str] = {}

    @property
    def num_inputs(self) -> int:
        return self._meter.num_inputs

    def run(self, data: bytes) -> None:
        """Run one input; whatever the target lets out is noted."""
        try:
            self._meter(data)
        except OverLimitError as error:
            if self._judge_limits:
                self._note("a limit", data, error)
        except Exception as error:
            self._note(_place(error), data, error)

    def write(self) -> None:
        meter = self._meter
        report = Report(
            num_inputs=meter.num_inputs,
            seconds=time.monotonic() - self._started,
            slowest_seconds=meter.slowest_seconds,
            largest_bytes=meter.largest_bytes,
            findings=self._findings,
        )
        self._path.write_text(json.dumps(asdict(report)), encoding="utf-8")

    def _note(self, place: str, data: bytes, error: Exception) -> None:
        if place in self._findings:
            return
        path = corpus.save_finding(self._target, data)
        self._findings[place] = f"{path.name}: {type(error).__name__}: {str(error)[:300]}"
        sys.stderr.write(f"\n{place}\n{''.join(traceback.format_exception(error)[-5:])}")


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


def arguments() -> argparse.Namespace:
    """What the process of one phase is told: a target, how many runs, a seed, and its folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()
