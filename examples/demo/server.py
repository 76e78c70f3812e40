"""The server's process: started, killed, started again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.demo.processes import how_it_ended, no_interrupts

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.05


class ServerError(RuntimeError):
    """The server doesn't start; the message says why, in its own last words or ours."""


class Server:
    """An experience buffer server on a loopback port, with its own store and log.

    Args:
        folder: Gets `server-data/` and `server.log`.
        port: To listen on; 0: a free one.

    Raises:
        ServerError: The port is in use, or none is free.
    """

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        if port and not _is_free(port):
            raise ServerError(
                f"port {port} of 127.0.0.1 is in use; give another one, or none for a free one"
            )
        self.address = f"127.0.0.1:{port or _free_port()}"
        """The same after every start."""
        self.metrics_address = f"127.0.0.1:{_free_port()}"
        """Where it serves /metrics."""
        self.data = folder / "server-data"
        """Its store."""
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the process and wait until it serves; how many seconds that took.

        Raises:
            ServerError: It ended, or it didn't serve in time.
        """
        begin_time = time.monotonic()
        command = [sys.executable, "-m", "experience_buffer_server", "serve"]
        command += ["--port", _port_of(self.address), "--data", str(self.data)]
        command += ["--metrics-port", _port_of(self.metrics_address)]
        # The demo's server is not the one that the caller's environment may configure.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EXPERIENCE_BUFFER_")}
        kept["EXPERIENCE_BUFFER_SERVER__LOG_FORMAT"] = "text"
        with self._log.open("ab") as log, no_interrupts():
            self._process = subprocess.Popen(
                command, env=kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while not self._serves():
            if self._process.poll() is not None:
                raise ServerError(self.fate)
            if time.monotonic() - begin_time > START_TIMEOUT_SECONDS:
                raise ServerError(
                    f"the server doesn't serve after {START_TIMEOUT_SECONDS:.0f} s: "
                    f"{self._last_words()}"
                )
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begin_time

    @property
    def fate(self) -> str:
        """How the process ended though nobody stopped it, in words; empty while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        said = f"its log is {self._log}" if status < 0 else self._last_words()
        return f"the server {how_it_ended(status)}; {said}"

    def kill(self) -> None:
        """End the process with SIGKILL: it can neither finish nor flush anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wait(self) -> None:
        """Wait until the process ends by itself."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End the process with SIGTERM and wait for it; SIGKILL if it takes too long."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
        return f"the end of its log {self._log}: {last.strip()}"

    def _serves(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _free_port() -> int:
    """One below those that the system gives to connections while the server is away."""
    candidates = random.SystemRandom().sample(range(10_000, 32_000), 100)
    port = next(filter(_is_free, candidates), None)
    if port is None:
        raise ServerError("no free port on 127.0.0.1")
    return port


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]
