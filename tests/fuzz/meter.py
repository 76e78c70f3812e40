"""What one input costs: processor time, and memory beyond what was in use before.

Time is that of the thread, so that a busy machine says nothing about the code. Memory is the peak
of the process's resident set (`VmHWM`), which the kernel keeps for nothing: an input that raises it
by more than half of the limit is run again, alone between a reset of the peak and a look at it. The
heap is trimmed at each reset, so that room left over by one input doesn't hide the next.

What an input allocates and never touches isn't resident and not seen; `confine` ends that, too: far
beyond the limit an allocation fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_SECONDS: Final = 0.1
MAX_BYTES: Final = 64 * 1024 * 1024
_SUSPECT_SECONDS: Final = 0.02
_SUSPECT_BYTES: Final = MAX_BYTES // 2
_INPUTS_PER_RESET: Final = 5000
_TRIES: Final = 3
_ADDRESS_SPACE: Final = 3 * 1024**3
_PEAK: Final = Path("/proc/self/clear_refs")
_STATUS: Final = Path("/proc/self/status")

_libc = ctypes.CDLL(None)


class OverLimitError(Exception):
    """An input took too long or too much."""


@dataclass(slots=True)
class Meter:
    """Runs inputs and keeps the largest costs. Not thread-safe."""

    run: Callable[[bytes], None]
    num_inputs: int = 0
    slowest_seconds: float = 0.0
    largest_bytes: int = 0
    _base_bytes: int = 0
    _inputs_since: int = 0

    def __call__(self, data: bytes) -> None:
        """Run one input.

        Raises:
            OverLimitError: It is over a limit each time that it is tried.
            Exception: Whatever the target lets out: a finding.
        """
        if self._inputs_since % _INPUTS_PER_RESET == 0:
            if self._base_bytes:
                self.largest_bytes = max(self.largest_bytes, _peak_bytes() - self._base_bytes)
            self._reset()
        self._inputs_since += 1
        self.num_inputs += 1
        started = time.thread_time()
        self.run(data)
        seconds = time.thread_time() - started
        if seconds > max(self.slowest_seconds, _SUSPECT_SECONDS):
            self._check_time(data, seconds)
        elif seconds > self.slowest_seconds:
            self.slowest_seconds = seconds
        if _peak_bytes() - self._base_bytes > _SUSPECT_BYTES:
            self._check_memory(data)

    def _check_time(self, data: bytes, seconds: float) -> None:
        for _ in range(_TRIES):
            started = time.thread_time()
            self.run(data)
            seconds = min(seconds, time.thread_time() - started)
            if seconds <= self.slowest_seconds:
                return
        self.slowest_seconds = seconds
        if seconds > MAX_SECONDS:
            raise OverLimitError(f"{1000 * seconds:.0f} ms for {len(data)} bytes")

    def _check_memory(self, data: bytes) -> None:
        taken = 0
        for _ in range(_TRIES):
            self._reset()
            self.run(data)
            taken = _status_bytes("VmHWM") - self._base_bytes
            if taken <= MAX_BYTES + len(data):
                break
        self.largest_bytes = max(self.largest_bytes, taken)
        self._reset()
        if taken > MAX_BYTES + len(data):
            raise OverLimitError(f"{taken / 2**20:.0f} MiB for {len(data)} bytes")

    def _reset(self) -> None:
        """Note what is in use now, and let the peak begin there."""
        gc.collect()
        _libc.malloc_trim(0)
        _PEAK.write_text("5", encoding="ascii")
        self._base_bytes = _status_bytes("VmRSS")


def confine() -> None:
    """Let allocations far beyond the limit fail instead of taking the machine down."""
    used = _status_bytes("VmSize")
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, resource.RLIM_INFINITY))


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no {key} in {_STATUS}")
