"""What a soak is made of: its buffers, its sizes and rates, and where its processes write."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from experience_buffer import (
    AdvantageConfig,
    BufferConfig,
    Client,
    ClientOptions,
    ConsumerConfig,
    Limiter,
    RetryOptions,
    Selector,
)
from tests import journal

QUEUE: Final = "queue"
"""Groups that a trainer learns from and a logger reads one by one; everything is consumed."""
REPLAY: Final = "replay"
"""Always full: what comes evicts what was there."""
LATE: Final = "late"
"""Groups that lack a field until a critic adds it."""
IDLE: Final = "idle"
"""Nothing comes; calls wait and are cancelled."""
GROUP_SIZE: Final = 8
GROUP_DEADLINE_SECONDS: Final = 6.0
LEASE_SECONDS: Final = 5.0
"""Of unary calls: what a killed client held comes back after it."""
REPLAY_ITEMS: Final = 120
HORIZON_SECONDS: Final = 30.0
"""What is consumed is remembered for as long: far shorter than by default, so that what is
remembered stops growing during the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every process of a soak has to know. It can be pickled."""

    address: str
    metrics_url: str
    folder: Path
    """For journals, checkpoints and signs."""

    def client(self) -> Client:
        """A client that finds the server quickly."""
        retry = RetryOptions(initial_backoff_seconds=0.05, max_backoff_seconds=0.5)
        return Client(self.address, timeout=30.0, options=ClientOptions(retry=retry))

    def journal(self, role: str) -> journal.Journal:
        """The journal that all lives of a role write."""
        return journal.Journal(self._journal_path(role))

    def events(self, role: str) -> list[dict[str, Any]]:
        return list(journal.events(self._journal_path(role)))

    def _journal_path(self, role: str) -> Path:
        return self.folder / f"journal-{role.replace(' ', '-')}"

    @property
    def is_pushing(self) -> bool:
        """Whether workers go on. A file says so: a process that is killed can't hold its lock."""
        return not (self.folder / "stop-pushing").exists()

    def stop_pushing(self) -> None:
        (self.folder / "stop-pushing").touch()


def buffers() -> tuple[BufferConfig, ...]:
    common: dict[str, Any] = {"duplicate_horizon_seconds": HORIZON_SECONDS, "lease_seconds": 60.0}
    return (
        BufferConfig(
            QUEUE,
            group_size=GROUP_SIZE,
            group_deadline_seconds=GROUP_DEADLINE_SECONDS,
            on_group_deadline="use_partial",
            advantage=AdvantageConfig("grpo"),
            consumers=(ConsumerConfig("trainer", "group"), ConsumerConfig("logger")),
            **common,
        ),
        BufferConfig(
            REPLAY,
            group_by="none",
            max_items=REPLAY_ITEMS,
            on_full="evict",
            remover="fifo",
            consumers=(replay_consumer(Selector("prioritized", exponent=0.6)),),
            **common,
        ),
        BufferConfig(
            LATE,
            group_size=GROUP_SIZE,
            on_missing_field="wait",
            advantage=AdvantageConfig("remax"),
            consumers=(ConsumerConfig("critic", raw=True), ConsumerConfig("trainer", "group")),
            **common,
        ),
        BufferConfig(IDLE, **common),
    )


def replay_consumer(selector: Selector) -> ConsumerConfig:
    """The reader of the replay buffer, with one selector or another."""
    return ConsumerConfig("learner", replay=True, selector=selector, limiter=Limiter(min_size=32))


def paced(per_second: float) -> Iterator[float]:
    """Yield when each call is due, by `time.monotonic`, once it is: a steady rate.

    A call that comes late because another one took long is late by that: what a stall costs all
    that would have come meanwhile isn't left out.
    """
    pause, begin = threading.Event(), time.monotonic()
    for number in itertools.count():
        due = begin + number / per_second
        pause.wait(max(due - time.monotonic(), 0.0))
        yield due
