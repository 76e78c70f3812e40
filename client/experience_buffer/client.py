"""The sync client; its verbs are generated from the async ones."""

from __future__ import annotations

from experience_buffer._sync.buffer_verbs import BufferVerbs
from experience_buffer._sync.content_verbs import ContentVerbs
from experience_buffer._sync.history_verbs import HistoryVerbs
from experience_buffer._sync.transfer_verbs import TransferVerbs

__all__ = ["Client"]
__dir__ = __all__.copy


class Client(TransferVerbs, ContentVerbs, HistoryVerbs, BufferVerbs):
    """Talks to an experience buffer server.

    It can be shared between threads, pickled, and used after a fork: the connection is made
    when first needed, one per process. gRPC itself may not survive a fork of a process that has
    used it; that is warned of.

    Args:
        address: "host", "host:port" (port 50051 unless given), "[v6 address]:port",
            "unix:path", or another gRPC target.
        token: Sent as `authorization: Bearer`; needs `tls` unless the server is on this machine.
        timeout: Seconds that a call may take, retries included, unless it says otherwise.
        tls: Encrypts the connection; None: plain.
        options: Limits, keepalive, retries.

    Every call raises `ExperienceBufferError` or one of its subclasses, never a gRPC error:
    `UnavailableError` when no server answers, `DeadlineExceededError` when one is too slow,
    `BufferNotFoundError`, and what the method names.
    """
