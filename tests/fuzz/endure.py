"""Gives one target a great many inputs, uninstrumented: each within its limits of time and memory.

`python -m tests.fuzz.endure TARGET --runs N --seed S --folder F`: mutates what is in F/corpus;
F/endure.json is the report, written every few seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import time
from pathlib import Path
from typing import Final

from tests.fuzz.findings import Watch
from tests.fuzz.meter import Meter, confine
from tests.fuzz.targets import MUTATIONS, make_target

MAX_INPUT_BYTES: Final = 64 * 1024
_HANG_SECONDS: Final = 20
_REPORT_SECONDS: Final = 5.0
_SHORT_BYTES: Final = 2048
_LONG_RATIO: Final = 0.002
_ROUNDS: Final = (1, 1, 1, 2, 3)


class Inputs:
    """Makes inputs of those there are. Not thread-safe."""

    def __init__(self, target: str, first: list[bytes], seed: int) -> None:
        self._mutation = MUTATIONS[target]
        self._short = [data for data in first if len(data) <= _SHORT_BYTES] or [b""]
        self._long = [data for data in first if len(data) > _SHORT_BYTES] or [b""]
        self._rng = random.Random(seed)

    def next(self) -> bytes:
        """One input, mostly of a short one, because more of them can be tried."""
        rng = self._rng
        data = rng.choice(self._long if rng.random() < _LONG_RATIO else self._short)
        for _ in range(rng.choice(_ROUNDS)):
            data = self._mutation(data, rng)
        return data[:MAX_INPUT_BYTES]


def main() -> None:
    """Run the target so many times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    first = [path.read_bytes() for path in sorted((asked.folder / "corpus").iterdir())]
    inputs = Inputs(asked.target, first, asked.seed)
    meter = Meter(make_target(asked.target))
    watch = Watch(asked.target, meter)
    confine()
    gc.freeze()
    report = asked.folder / "endure.json"
    due = 0.0
    for data in first:
        watch.run(data)
    while meter.num_inputs < asked.runs:
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_SECONDS
            report.write_text(json.dumps(watch.finished().as_json()), encoding="utf-8")
            # An input that never ends: where it was, and the end of this process.
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
        data = inputs.next()
        watch.run(data)
    report.write_text(json.dumps(watch.finished().as_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
