"""Who calls: the name that quotas, logs and answers use for the caller of the current RPC.

The boundary of every RPC says it once, before the handler runs; the handler, the stream it opens and
the tasks they start read it here. Who may do what is decided in `access`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from urllib.parse import unquote

LOCAL_NAME = "local"
"""The caller where there is no RPC: the server itself, and clients on a Unix socket."""

MAX_HOLDER = 256
"""Characters of what a caller calls itself; more are cut."""


def _everything(buffer: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one RPC."""

    name: str
    """Of its token or certificate where it has one, else its address without the port; never empty."""
    peer: str = ""
    """Where it calls from, with the port: for logs."""
    covers: Callable[[str], bool] = _everything
    """Whether it may see the buffer with this name."""
    holder: str = ""
    """What it calls itself, for those who look at who holds leases or waits; empty where it doesn't say."""
    on_stream: bool = False
    """It samples on a stream, whose end gives back what it holds."""

    @property
    def address(self) -> str:
        """Where it calls from, with the port, as people write it; empty where that is no network."""
        kind, _, rest = self.peer.partition(":")
        return unquote(rest) if kind in ("ipv4", "ipv6") else ""


_current: ContextVar[Caller] = ContextVar("caller", default=Caller(LOCAL_NAME))  # noqa: B039


def current_caller() -> Caller:
    """The caller of the current RPC; outside of one, the server itself.

    It is known in the task that handles the RPC and in all tasks that this one starts.
    """
    return _current.get()


def caller_of() -> str:
    """The name of who calls: what a quota per client counts by."""
    return _current.get().name


def entered(caller: Caller) -> None:
    """Say who calls, for the rest of the current task."""
    _current.set(caller)


def named(holder: str, *, on_stream: bool = False) -> None:
    """Note what the caller calls itself, for the rest of the current task and what it starts."""
    entered(replace(current_caller(), holder=holder[:MAX_HOLDER], on_stream=on_stream))


def address_of(peer: str) -> str:
    """The address of a peer without its port.

    Args:
        peer: As gRPC names it: "ipv4:10.0.0.7:4711", "ipv6:%5B::1%5D:4711", "unix:/run/x.sock".
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return LOCAL_NAME
    return unquote(rest).rpartition(":")[0].strip("[]")
