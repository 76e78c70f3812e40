"""A server that says what its memory holds: `python -m tests.soak.traced serve ...`.

For hunting a growth that the soak has found; it costs a third of the speed. At each SIGUSR1 it
writes to the file that `SOAK_TRACE` names: what was allocated since the first time and is still
there, by line, and how many objects of which type there are.
"""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from collections import Counter
from pathlib import Path
from types import FrameType

from experience_buffer_server.commands.cli import main

_NUM_LINES = 40
_NUM_FRAMES = 6
_baseline: list[tracemalloc.Snapshot] = []
_types: list[Counter[str]] = []


def _report(number: int, frame: FrameType | None) -> None:
    gc.collect()
    counts = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.get_objects())
    snapshot = tracemalloc.take_snapshot()
    if not _baseline:
        _baseline.append(snapshot)
        _types.append(counts)
        return
    grown = sorted((counts - _types[0]).items(), key=lambda one: -one[1])
    lines = [f"{count:+9d} {name}" for name, count in grown[:_NUM_LINES]]
    for kind in ("lineno", "traceback"):
        found = snapshot.compare_to(_baseline[0], kind)[:_NUM_LINES]
        total = sum(one.size_diff for one in snapshot.compare_to(_baseline[0], "filename"))
        lines.append(f"\n--- {kind}, {total / 1e6:+.2f} MB in all")
        for one in found:
            where = " <- ".join(str(frame) for frame in reversed(list(one.traceback)))
            lines.append(f"{one.size_diff / 1e3:+9.1f} kB {one.count_diff:+8d} {where}")
    Path(os.environ["SOAK_TRACE"]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _report)
    tracemalloc.start(_NUM_FRAMES)
    main()
