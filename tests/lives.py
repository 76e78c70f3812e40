"""Processes of tests that die and begin anew: workers, trainers, whoever is killed beside a server."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.chaos.worker", "tests.soak.clients"])
_COMPLAINT_CHARACTERS = 2000


class Lives:
    """The lives of one process, one after the other. Not thread-safe.

    Each is a fork of a process that has imported everything and opened nothing: it begins at once,
    without the second of processor time that imports take.

    Args:
        name: What it is called, and the file of its errors.
        folder: Where that file is.
        live: What it does; it and the arguments can be pickled.
    """

    def __init__(self, name: str, folder: Path, live: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self._errors = folder / f"{name}.errors"
        self._errors.touch()
        self._call = (self._errors, live, arguments)
        self.start()

    def start(self) -> None:
        self.process = _CONTEXT.Process(target=_live, args=self._call, name=self.name, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self.process.kill()
        self.process.join()

    def end(self, seconds: float) -> None:
        """Wait until it has ended by itself.

        Raises:
            AssertionError: It hasn't in time, or not well.
        """
        self.process.join(seconds)
        assert self.process.exitcode == 0, (
            f"{self.name} ended with {self.process.exitcode}: {self.complaint}"
        )

    @property
    def complaint(self) -> str:
        """What it has complained of, in all its lives."""
        return self._errors.read_text(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]


def _live(errors: Path, live: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with errors.open("ab") as file:
        os.dup2(file.fileno(), 2)
    live(*arguments)
