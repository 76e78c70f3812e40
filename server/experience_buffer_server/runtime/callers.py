"""Who calls: the name that quotas, logs and answers use for the caller of the current RPC.

The boundary of every RPC says it once, before the handler runs; the handler, the stream it opens and
the tasks they start read it here. Who may do what is decided in `access`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote

LOCAL_NAME = "local"
"""The caller where there is no RPC: the server itself, and clients on a Unix socket."""


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


def address_of(peer: str) -> str:
    """The address of a peer without its port.

    Args:
        peer: As gRPC names it: "ipv4:10.0.0.7:4711", "ipv6:%5B::1%5D:4711", "unix:/run/x.sock".
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return LOCAL_NAME
    return unquote(rest).rpartition(":")[0].strip("[]")
