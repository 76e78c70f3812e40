"""How full the store and its disk are, read when Prometheus scrapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experience_buffer_server.store.lmdb.store import StoreStats

_PREFIX = "experience_buffer_store_"
_SIZES: tuple[tuple[str, str, Callable[[StoreStats], int]], ...] = (
    (
        "live_bytes",
        "Pages of the store that hold rows, and what holds large payloads.",
        lambda stats: stats.live_bytes,
    ),
    (
        "file_bytes",
        "Room of the store that was ever in use; what isn't live can be reused.",
        lambda stats: stats.file_bytes,
    ),
)


class StoreGauges(Collector):
    """Sizes of a store; `collect` may be called from any thread.

    Args:
        stats: Of the open store.
        path: Its folder.
        limit_bytes: What it may grow to.
    """

    def __init__(self, stats: StoreStats, path: Path, *, limit_bytes: int) -> None:
        self._stats = stats
        self._path = path
        self._limit_bytes = limit_bytes

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known without collecting at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family per size; without a value until the writer has said how large the store is."""
        for name, text, size in _SIZES:
            family = GaugeMetricFamily(_PREFIX + name, text)
            if self._stats.map_bytes:
                family.add_metric([], size(self._stats))
            yield family
        limit = "What the store may grow to: store.max_map_bytes."
        yield GaugeMetricFamily(_PREFIX + "limit_bytes", limit, value=self._limit_bytes)
        free = GaugeMetricFamily(_PREFIX + "disk_free_bytes", "Free space on the store's disk.")
        disk = os.statvfs(self._path)
        free.add_metric([], disk.f_bavail * disk.f_frsize)
        yield free
