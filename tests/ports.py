"""Ports for servers that come back on the one that they had."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_OF_CONNECTIONS = 32_768
"""Linux's default."""
_given: set[int] = set()


def unused_ports(count: int) -> list[int]:
    """Ports on which nobody listens, and which no connection gets while a server is away.

    Those that the system chooses, for port 0, are also those that it gives to outgoing connections:
    a server that was killed may find its own taken by somebody's client. For the same reason none is
    given twice, and test runners beside each other have ports of their own.
    """
    # Tests that run beside this one may have seeded the usual source alike.
    source = random.SystemRandom()
    first = _LOWEST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(first, _first_of_connections(), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = source.choice(own)
            if port in _given:
                continue
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            _given.add(port)
            ports.append(port)
    return ports


def _first_of_connections() -> int:
    try:
        first = int(_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return _FIRST_OF_CONNECTIONS
    # Where connections get all ports, some are as good as others.
    return first if first > _LOWEST else _FIRST_OF_CONNECTIONS
