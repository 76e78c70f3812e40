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
from experience_buffer_server.web.inside.texts import Texts

_RENDERERS: Final = 2
"""Scrapes that are written at once."""
_LOOKERS: Final = 2
"""Payloads that are taken apart at once: the interpreter runs one thread at a time."""

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
    texts: Texts | None = None
    """What tokens read; None: there is no tokenizer."""
    lookers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_LOOKERS, "looking")
    )
    """Take payloads apart, so that nobody else waits for it."""
    renderers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_RENDERERS, "metrics")
    )
