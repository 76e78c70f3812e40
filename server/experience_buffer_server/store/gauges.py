"""How full the store and its disk are, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experience_buffer_server.store.interface import Store, StoreStats

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
        store: An open one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known without collecting at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family per size; without a value until the writer has said how large the store is."""
        for name, text, size in _SIZES:
            family = GaugeMetricFamily(_PREFIX + name, text)
            if self._store.stats.file_bytes:
                family.add_metric([], size(self._store.stats))
            yield family
        limit = "What the store may grow to: store.max_map_bytes."
        yield GaugeMetricFamily(_PREFIX + "limit_bytes", limit, value=self._store.limit_bytes)
        free = GaugeMetricFamily(_PREFIX + "disk_free_bytes", "Free space on the store's disk.")
        if (num_bytes := self._store.disk_free_bytes()) is not None:
            free.add_metric([], num_bytes)
        yield free
