"""What the HTTP routes work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from experience_buffer_server.access.guard import Guard
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.health import Pulse
from experience_buffer_server.rpc.service import Service

_RENDERERS: Final = 2
"""Scrapes that are written at once."""

Wsgi = Callable[[dict[str, Any], Callable[[str, list[tuple[str, str]]], None]], Sequence[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One server, as its HTTP side sees it."""

    backend: Backend
    service: Service
    """Whose calls the routes make."""
    guard: Guard
    pulse: Pulse
    metrics: Wsgi
    """Writes the metrics; it may ask the event loop, so it runs in a thread."""
    address: str
    """Of the gRPC port."""
    is_secure: bool
    """Whether the ports speak TLS."""
    renderers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_RENDERERS, "metrics")
    )
