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

START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.05


class ServerError(RuntimeError):
    """The server doesn't start; the message names its log."""


class Server:
    """An experience buffer server on a free loopback port, with its own store and log.

    Args:
        folder: Gets `server-data/` and `server.log`.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        """The same after every start."""
        self._data = folder / "server-data"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the process and wait until it serves; how many seconds that took.

        Raises:
            ServerError: It ended, or it didn't serve in time.
        """
        begin_time = time.monotonic()
        command = [sys.executable, "-m", "experience_buffer_server", "serve"]
        command += ["--port", self.address.rpartition(":")[2], "--data", str(self._data)]
        command += ["--metrics-port", "-1"]
        # The demo's server is not the one that the caller's environment may configure.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EXPERIENCE_BUFFER_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=kept, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while not self._serves():
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}: {self._log}")
            if time.monotonic() - begin_time > START_TIMEOUT_SECONDS:
                raise ServerError(f"no server after {START_TIMEOUT_SECONDS:.0f} s: {self._log}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begin_time

    @property
    def has_ended(self) -> bool:
        """True when the process is gone though nobody stopped it."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End the process with SIGKILL: it can neither finish nor flush anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

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
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise ServerError("no free port on 127.0.0.1")
