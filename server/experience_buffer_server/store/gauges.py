"""How full the store and its disk are, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from experience_buffer_server.store.interface import Store

_PREFIX = "experience_buffer_store_"
_SIZES = {
    "live_bytes": "Pages of the store that hold rows, and what holds large payloads.",
    "file_bytes": "Room of the store that was ever in use; what isn't live can be reused.",
}
"""By their names in `StoreStats`."""


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
        stats = self._store.stats
        for name, text in _SIZES.items():
            yield GaugeMetricFamily(
                _PREFIX + name, text, value=getattr(stats, name) if stats.file_bytes else None
            )
        limit = "What the store may grow to: store.max_map_bytes."
        yield GaugeMetricFamily(_PREFIX + "limit_bytes", limit, value=self._store.limit_bytes)
        free, text = self._store.disk_free_bytes(), "Free space on the store's disk."
        yield GaugeMetricFamily(_PREFIX + "disk_free_bytes", text, value=free)
