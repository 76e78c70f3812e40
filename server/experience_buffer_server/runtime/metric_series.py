"""The series of metrics that have a label for the buffer, by buffer, so that they end with it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, TypeVar

from prometheus_client import Counter, Histogram

_Metric = TypeVar("_Metric", Counter, Histogram)


class SeriesByBuffer:
    """Gives out the series of metrics and remembers which are of which buffer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, dict[tuple[Any, ...], Any]] = {}
        """By buffer, then by metric and its other labels; changed under the lock only."""

    def of(self, metric: _Metric, buffer: str, *labels: str) -> _Metric:
        """The series of a metric whose first label is the buffer, made where there is none."""
        key = (metric, *labels)
        made = self._series.get(buffer, {}).get(key)
        if made is None:
            with self._lock:
                made = metric.labels(buffer, *labels)
                self._series.setdefault(buffer, {})[key] = made
        series: _Metric = made
        return series

    def keep(self, buffers: Collection[str]) -> None:
        """End the series of all other buffers."""
        for buffer in self._series.keys() - buffers:
            self.forget(buffer)

    def forget(self, buffer: str) -> None:
        """End all series of a buffer; the time it takes is in proportion to them alone."""
        with self._lock:
            for metric, *labels in self._series.pop(buffer, {}):
                metric.remove(buffer, *labels)
