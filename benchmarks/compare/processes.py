"""Workers as the harness sees them: processes that take commands and answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.compare.adapters import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
_CALL_SECONDS = 240.0
_END_SECONDS = 20.0


class WorkerError(RuntimeError):
    """A worker failed or fell silent; the message holds the end of its log."""


def interpreter(adapter: str) -> Path | None:
    """The Python that runs an adapter; None where its environment isn't set up."""
    environment = ENVIRONMENTS[adapter]
    if not environment:
        return Path(sys.executable)
    python = PEERS / environment / "bin" / "python"
    return python if python.exists() else None


class Process:
    """One worker process.

    Args:
        adapter: Its system.
        name: Of its log.
        logs: Where the log goes.
    """

    def __init__(self, adapter: str, name: str, logs: Path) -> None:
        python = interpreter(adapter)
        if python is None:
            raise WorkerError(f"{adapter} isn't set up: make bench-setup")
        self._log = logs / f"{adapter}-{name}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # Peers run in environments of their own, and must find nothing of this project's but
        # the benchmarks.
        paths = [str(ROOT)]
        if not ENVIRONMENTS[adapter]:
            paths += [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        environment["PYTHONPATH"] = ":".join(paths)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.compare.worker", adapter],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
                text=True,
            )
        self.pid = self._process.pid
        self._versions: Mapping[str, str] | None = None

    def versions(self) -> Mapping[str, str]:
        """What it says of its packages, once it is up."""
        if self._versions is None:
            self._versions = cast("Mapping[str, str]", self.result()["versions"])
        return self._versions

    def start(self, verb: str, **arguments: Any) -> None:
        """Send a command; `result` waits for its answer."""
        self.versions()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """The answer to the command sent before.

        Raises:
            WorkerError: The command failed, or no answer came in time.
        """
        assert self._process.stdout is not None
        # Who is killed answers with the end of its output: a plain way to a timeout.
        watchdog = threading.Timer(_CALL_SECONDS, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise WorkerError(f"no answer; {self._log}:\n{self._log.read_text()[-2000:]}")
        answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise WorkerError(f"{answer['error']}; {self._log}:\n{self._log.read_text()[-2000:]}")
        return answer

    def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            WorkerError: It failed.
        """
        self.start(verb, **arguments)
        return self.result()

    def hang_up(self) -> None:
        """Close its input, which ends it."""
        assert self._process.stdin is not None
        if self._process.poll() is None and not self._process.stdin.closed:
            self._process.stdin.close()

    def end(self) -> None:
        """Close its input, and kill it if that doesn't end it."""
        self.hang_up()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Fleet:
    """The processes of one system, kept for all its turns: a host, writers and a reader."""

    def __init__(self, adapter: str, num_writers: int, logs: Path) -> None:
        self._adapter, self._num_writers, self._logs = adapter, num_writers, logs
        self._start()

    def renew(self) -> None:
        """Replace all processes."""
        self.end()
        self._start()

    def _start(self) -> None:
        names = [f"writer{number}" for number in range(self._num_writers)]
        self.host = Process(self._adapter, "host", self._logs)
        self.writers = [Process(self._adapter, name, self._logs) for name in names]
        self.reader = Process(self._adapter, "reader", self._logs)

    def end(self) -> None:
        """End all processes, clients first."""
        for process in self.all[1:]:
            process.hang_up()
        for process in reversed(self.all):
            process.end()

    @property
    def all(self) -> Sequence[Process]:
        """The host first."""
        return (self.host, *self.writers, self.reader)


def together(processes: Iterable[Process], verb: str, **arguments: Any) -> list[dict[str, Any]]:
    """Send all of them one command and wait for all answers."""
    processes = list(processes)
    for process in processes:
        process.start(verb, **arguments)
    return [process.result() for process in processes]
