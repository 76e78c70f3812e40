"""What a running server says of itself: its metrics, and the description of its HTTP routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from experience_buffer import Client

_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Said:
    """The answers of a server that has just started."""

    metrics: str
    """In the text format of Prometheus."""
    openapi: dict[str, Any]
    """The OpenAPI document."""


@cache
def said() -> Said:
    """Start a server in memory, on ports that are free, and ask it. Once per process."""
    command = [sys.executable, "-m", "experience_buffer_server", "serve", "--memory"]
    command += ["--port", "0", "--metrics-port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"EXPERIENCE_BUFFER_SERVER__LOG_FORMAT": "json"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            address, port = _listening(process.stderr or ())
            with Client(address) as client:
                client.publish_policy_version(0)  # Of buffers that have none, nothing is shown.
            return Said(_get(port, "/metrics"), json.loads(_get(port, "/openapi.json")))
        finally:
            process.terminate()
            process.communicate(timeout=_SECONDS)


def _listening(log: Iterable[str]) -> tuple[str, int]:
    """Where the server says that it listens, and its port of HTTP."""
    for line in log:
        entry = json.loads(line)
        if entry["message"] == "listening":
            return entry["address"], entry["metrics_port"]
    raise RuntimeError("the server that is asked for the reference has ended at once")


def _get(port: int, path: str) -> str:
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        text: str = answer.read().decode()
    return text
