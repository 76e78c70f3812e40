"""Starts processes of the server, and trainers, by forking one that has imported their modules already.

A start takes a tenth of the time: most of it goes into importing. What a process may notice: its command
line as others see it is the nursery's, and so is the seed of its hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
_SERVER = "experience_buffer_server"
_WRITER = "experience_buffer_server.store.lmdb.writer_process"
TRAINER = "tests.integration.timeline_trainer"
_FORKED = (_SERVER, _WRITER, TRAINER)
_IMPORTS = (
    *(_WRITER, "experience_buffer_server.app", "experience_buffer_server.commands.cli"),
    "experience_buffer_server.web.server",
    "experience_buffer.client",
)
_NUM_BYTES = 1 << 17
_MAX_DESCRIPTORS = 8
_ABOVE = 100
"""Descriptors are kept above this number until they get theirs."""


class Forked:
    """A process of the nursery, by the names that `subprocess.Popen` has for the same."""

    def __init__(self, nursery: Nursery, pid: int, stderr: IO[Any] | None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._nursery = nursery
        self._descriptor = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit status."""
        if self.returncode is None:
            watched = select.poll()
            watched.register(self._descriptor, select.POLLIN)
            if not watched.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._nursery.ask({"ended": self.pid})
                os.close(self._descriptor)
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that forks. It can be shared between threads, and ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._environment = _environment()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
                start_new_session=True,
            )

    def close(self) -> None:
        """Let it end; its processes go on."""
        self._socket.close()
        self._process.wait()

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        """Its answer to one message."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
            return int(self._socket.recv(_NUM_BYTES))

    def popen(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stderr: int | None = None,
        text: bool = False,
        **others: Any,
    ) -> Forked | subprocess.Popen[Any]:
        """As `subprocess.Popen`; a process that needs its own interpreter gets it.

        That is one of another module, and one whose environment is another for more than the server's
        settings: libraries read theirs when they are loaded.
        """
        is_python = command[0] == sys.executable and "-m" in command
        module = command[command.index("-m") + 1] if is_python else ""
        environment = dict(os.environ if env is None else env)
        if module not in _FORKED or _environment(environment) != self._environment:
            return subprocess.Popen(
                command, pass_fds=pass_fds, env=env, cwd=cwd, stderr=stderr, text=text, **others
            )
        ours, theirs = os.pipe() if stderr == subprocess.PIPE else (-1, os.dup(2))
        message = {
            "module": module,
            "arguments": list(command[command.index("-m") + 2 :]),
            "environment": environment,
            "folder": str(cwd or Path.cwd()),
            "descriptors": [2, *pass_fds],
        }
        try:
            pid = self.ask(message, [theirs, *pass_fds])
        finally:
            os.close(theirs)
        mode = "r" if text else "rb"
        return Forked(self, pid, open(ours, mode) if ours >= 0 else None)


@functools.cache
def nursery() -> Nursery:
    made = Nursery()
    atexit.register(made.close)
    return made


def _environment(whole: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What is fixed when an interpreter starts and libraries are loaded."""
    own = ("EXPERIENCE_BUFFER_", "PYTEST_", "PYTHONPATH")
    return {name: value for name, value in whole.items() if not name.startswith(own)}


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork on demand; in a new process what it is to be, and in the nursery None at its end."""
    while True:
        data, received, _, _ = socket.recv_fds(connection, _NUM_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            answer = os.waitstatus_to_exitcode(os.waitpid(message["ended"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                return message, received
        for descriptor in received:
            os.close(descriptor)
        connection.send(str(answer).encode())


def main() -> None:
    """Import, then fork until the tests end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # As `serve` has it before it imports gRPC.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for module in _IMPORTS:
        importlib.import_module(module)
    born = _serve(connection)
    if born is None:
        return
    message, received = born
    os.setsid()
    connection.close()
    for descriptor, number in zip(_moved(received), message["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [message["module"], *message["arguments"]]
    if message["module"] == _WRITER:
        sys.exit(importlib.import_module(_WRITER).main())
    runpy.run_module(message["module"], run_name="__main__", alter_sys=True)


def _moved(descriptors: Sequence[int]) -> list[int]:
    """Out of the way of those that they are to become."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for one in descriptors]
    for one in descriptors:
        os.close(one)
    return moved


if __name__ == "__main__":
    main()
