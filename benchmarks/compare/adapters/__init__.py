"""One module per system, each with the same few verbs.

An adapter is imported by the interpreter of its system's environment, so this package imports
nothing but the standard library, numpy and the workload.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.workload import Received, Size

ENVIRONMENTS: Mapping[str, str] = {
    "ours": "",
    "echo": "",
    "floor": "",
    "redis_lists": "redis",
    "reverb_tables": "reverb",
    "transfer_queue_partition": "transferqueue",
}
"""By adapter, the folder of its environment under `.peers`; empty: this project's own."""


class Writer(Protocol):
    """Pushes groups of the workload."""

    @property
    def num_acked(self) -> int:
        """Experiences acknowledged so far."""

    def push(self, number: int) -> None:
        """Push one group; a writer that works in the background doesn't wait for its ack."""

    def push_one(self, number: int) -> None:
        """Push one experience, by its number in a sequence that fills group after group; wait."""

    def flush(self) -> None:
        """Wait until everything is acknowledged."""

    def close(self) -> None:
        """Disconnect."""


class Reader(Protocol):
    """Samples batches, each experience once."""

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups, whoever wrote at the same time."""

    def sample(self) -> Any:
        """One batch by the fastest way to read many; its arrays can be used at once."""

    def fetch(self) -> Any:
        """One batch by a call of its own, nothing read ahead."""

    def settle(self, batch: Any) -> None:
        """Say that a batch was used, where the system wants to know."""

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""

    def close(self) -> None:
        """Disconnect."""


class Adapter(Protocol):
    """What each module here is."""

    def serve(
        self, folder: Path, size: Size, variant: str
    ) -> AbstractContextManager[tuple[str, Mapping[str, int]]]:
        """Run a server; its address, and its processes' ids by name."""

    def writer(self, address: str, size: Size, writer: int, mode: str) -> Writer:
        """Connect a writer; its number makes its experiences' identities unique."""

    def reader(self, address: str, size: Size, mode: str) -> Reader:
        """Connect a reader."""

    def leave(self) -> None:
        """Let go of what this process's writers and readers share; their server is about to end."""

    def versions(self) -> Mapping[str, str]:
        """Of the packages that count."""


def load(name: str) -> Adapter:
    """Import an adapter.

    Raises:
        ValueError: There is no such adapter.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"adapter {name!r} is none of {sorted(ENVIRONMENTS)}")
    return cast("Adapter", importlib.import_module(f"{__name__}.{name}"))


def plain(version: str) -> str:
    """A version without what a build adds to it."""
    return re.sub(r"\+.*", "", version)
