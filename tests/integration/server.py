"""A real server as a child process: started, stopped, killed and started again on one port."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc

from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.nursery import Forked, nursery
from tests.ports import unused_ports

DEFAULT_MODULE = "experience_buffer_server"
Stub = ExperienceBufferStub
"""What plain gRPC speaks through; it knows nothing of this package's client."""
START_SECONDS = 30.0
STOP_SECONDS = 30.0
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted server is found again at once, and channels of tests are not shared.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]


class Server:
    """The server over `folder/data`; its first port is its port for all its lives."""

    running: ClassVar[set[Server]] = set()
    """Servers that were not closed yet; for the report of a failed test."""

    def __init__(
        self,
        folder: Path,
        *,
        toml: str = "",
        environment: dict[str, str] | None = None,
        module: str = DEFAULT_MODULE,
        compiled_reader: bool = False,
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.toml = toml
        self.environment = environment or {}
        self.module = module
        """What is run: the server, or something around it."""
        self.compiled_reader = compiled_reader
        """Whether it loads the compiled reader, as servers do; a start takes half a second longer."""
        self.port = 0
        self.metrics_port = 0
        self.log: list[str] = []
        """Lines of all lives, the present one included."""
        self._process: Forked | subprocess.Popen[Any] | None = None
        self._readers: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the present life."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> Server:
        """Start it and wait until it listens."""
        Server.running.add(self)
        if not self.port:
            self.port, self.metrics_port = unused_ports(2)
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.toml"
        config.write_text(self.toml, encoding="utf-8")
        command = [sys.executable, "-m", self.module, "serve"]
        command += ["--config", str(config), "--data", str(self.data)]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        self._process = nursery().popen(
            command,
            cwd=self.folder,
            env=os.environ
            | {
                "EXPERIENCE_BUFFER_SERVER__LOG_FORMAT": "json",
                "EXPERIENCE_BUFFER_SERVER__COMPILED_READER": str(self.compiled_reader),
                # A second of CPU time: for those that compute only.
                "EXPERIENCE_BUFFER_COMPUTE__START_EARLY": "False",
            }
            | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun, listening = threading.Event(), threading.Event()
        ends = (self._process, begun, listening)
        reader = threading.Thread(target=self._read_log, args=ends, daemon=True)
        self._readers.append(reader)
        reader.start()
        assert begun.wait(START_SECONDS), f"no server in time:\n{self.tail()}"
        if not listening.is_set():
            raise AssertionError(f"it ended at once, with {self.wait()}:\n{self.tail()}")
        return self

    def _read_log(
        self,
        process: Forked | subprocess.Popen[Any],
        begun: threading.Event,
        listening: threading.Event,
    ) -> None:
        """Collect the log of one life; `begun` is set when it listens, or has ended before."""
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line)
            if '"listening"' in line:
                entry: dict[str, Any] = json.loads(line)
                if not entry["address"].startswith("unix:"):
                    self.port = int(entry["address"].rpartition(":")[2])
                self.metrics_port = int(entry["metrics_port"])
                listening.set()
                begun.set()
        # The children hold the other end too: when it closes, all of that life is gone.
        process.stderr.close()
        begun.set()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait until it and its children have ended; the exit status."""
        assert self._process is not None, "not started"
        status = self._process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
            assert not reader.is_alive(), "a child of the server outlives it"
        self._readers.clear()
        return status

    def stop(self) -> int:
        """Stop it with SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait()

    def die(self, *, with_children: bool = False) -> None:
        """Kill it with SIGKILL; its children may still be ending unless they are killed first."""
        assert self._process is not None, "not started"
        for child in self.children() if with_children else ():
            os.kill(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def children(self, module: str = "") -> list[int]:
        """Process ids of its children that run a module."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        children = []
        for child in map(int, listed.read_text(encoding="ascii").split()):
            # It may have ended since.
            with suppress(FileNotFoundError, ProcessLookupError):
                if module in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8"):
                    children.append(child)
        return children

    def restart(self) -> None:
        """Kill it and start it again at once."""
        self.die()
        self.start()

    def close(self) -> None:
        """End it whatever its state. Idempotent."""
        Server.running.discard(self)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self.wait()

    def tail(self, lines: int = 60) -> str:
        """The last lines of its log."""
        return "".join(self.log[-lines:])

    def metrics(self, token: str = "", *, tls: ssl.SSLContext | None = None) -> str:
        """What Prometheus reads of it, over TLS where it is told how.

        Raises:
            HTTPError: It refuses.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"{'https' if tls else 'http'}://localhost:{self.metrics_port}/metrics"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
            return str(answer.read().decode())

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A plain gRPC channel to it."""
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            yield channel

    @contextmanager
    def stub(self) -> Iterator[Stub]:
        """A plain generated stub, which knows nothing of this package's client."""
        with self.channel() as channel:
            yield Stub(channel)


MakeServer = Callable[..., Server]
"""Makes and starts a server; takes the options of `Server`."""


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Start a server; in the end it has to stop in order, and to have logged no error of its own."""
    try:
        yield server.start()
        assert server.stop() == 0
        problems = [line for line in server.log if '"ERROR"' in line or "Traceback" in line]
        assert not problems, "".join(problems[:5])
    finally:
        server.close()


def command(*arguments: object, columns: int = 200) -> subprocess.CompletedProcess[str]:
    """Run `experience-buffer` as in a terminal of so many columns."""
    return subprocess.run(
        [sys.executable, "-m", DEFAULT_MODULE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"COLUMNS": str(columns)},
    )


def eventually(condition: Callable[[], Any], what: str, *, seconds: float = 40.0) -> Any:
    """Wait until the condition is true; its value."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        pause.wait(0.01)
    return value
