"""Gives one target a great many inputs, uninstrumented: each within its limits of time and memory.

`python -m tests.fuzz.endure TARGET --runs N --seed S --folder F`: mutates what is in F/corpus;
F/endure.json is the report, written every few seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import time
from collections.abc import Iterator
from typing import Final

from tests.fuzz.decoders import MUTATIONS
from tests.fuzz.findings import Watch, arguments
from tests.fuzz.meter import confine

MAX_INPUT_BYTES: Final = 64 * 1024
_HANG_SECONDS: Final = 20
_REPORT_SECONDS: Final = 5.0
_SHORT_BYTES: Final = 2048
_LONG_RATIO: Final = 0.002
_ROUNDS: Final = (1, 1, 1, 2, 3)


def inputs(target: str, first: list[bytes], seed: int) -> Iterator[bytes]:
    """Make inputs of those there are, endlessly; mostly of short ones, as more can be tried."""
    mutation, rng = MUTATIONS[target], random.Random(seed)
    short = [data for data in first if len(data) <= _SHORT_BYTES] or [b""]
    long = [data for data in first if len(data) > _SHORT_BYTES] or [b""]
    while True:
        data = rng.choice(long if rng.random() < _LONG_RATIO else short)
        for _ in range(rng.choice(_ROUNDS)):
            data = mutation(data, rng)
        yield data[:MAX_INPUT_BYTES]


def main() -> None:
    asked = arguments()
    first = [path.read_bytes() for path in sorted((asked.folder / "corpus").iterdir())]
    made = inputs(asked.target, first, asked.seed)
    watch = Watch(asked.target, asked.folder / "endure.json")
    confine()
    gc.freeze()
    due = 0.0
    for data in first:
        watch.run(data)
    while watch.num_inputs < asked.runs:
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_SECONDS
            watch.write()
            # An input that never ends: where it was, and the end of this process.
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
        watch.run(next(made))
    watch.write()


if __name__ == "__main__":
    main()
