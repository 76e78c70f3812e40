"""The page of the metrics, from what a server says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from experience_buffer_server.runtime.metrics import Metrics
from scripts.documentation.reference.running import said

_INTRODUCTION: Final = """# Metrics

What `/metrics` on `server.metrics_port` has, in the text format of Prometheus. Labels are bounded: no uid
and no group is one. [Operations](../operations.md#watching) has the alerts, and
[docker/grafana](../../docker/grafana) the dashboard.
"""
_OF_THE_PROCESS: Final = ("process_", "python_")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


def page() -> str:
    """The page, one table; those that every Python process has are only named."""
    found = families()
    ours = [each for each in found if not each.name.startswith(_OF_THE_PROCESS)]
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | "
        f"{each.text} |\n"
        for each in ours
    ]
    others = ", ".join(f"`{each.name}`" for each in found if each not in ours)
    return (
        f"{_INTRODUCTION}\n| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n{''.join(rows)}\n"
        f"Beside these there is what every Python process says of itself: {others}.\n"
    )


def families() -> tuple[Family, ...]:
    """What a server that has just started shows, with a buffer in memory."""
    found = text_string_to_metric_families(said().metrics)
    return tuple(_family(each) for each in found if not each.name.endswith("_created"))


def _family(metric: Metric) -> Family:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    labels = {label for sample in metric.samples for label in sample.labels if label != "le"}
    known = _labels().get(metric.name, ())
    text = metric.documentation.replace("|", "\\|")
    return Family(name, metric.type, text, known or tuple(sorted(labels)))


@cache
def _labels() -> dict[str, tuple[str, ...]]:
    """Of metrics that have no series before something happens."""
    collectors = Metrics().registry._names_to_collectors.values()
    return {
        each._name: tuple(each._labelnames)
        for each in collectors
        if hasattr(each, "_labelnames") and hasattr(each, "_name")
    }
