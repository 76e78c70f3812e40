"""The async client: the same verbs and constructor as the sync one, over `grpc.aio`."""

from __future__ import annotations

from experience_buffer._async.buffer_verbs import AsyncBufferVerbs
from experience_buffer._async.content_verbs import AsyncContentVerbs
from experience_buffer._async.history_verbs import AsyncHistoryVerbs
from experience_buffer._async.transfer_verbs import AsyncTransferVerbs

__all__ = ["AsyncClient"]
__dir__ = __all__.copy


class AsyncClient(AsyncTransferVerbs, AsyncContentVerbs, AsyncHistoryVerbs, AsyncBufferVerbs):
    """Talks to an experience buffer server from an event loop; the verbs are `Client`'s.

    It can be shared between the tasks of one loop and pickled: the connection is made when first
    needed, one per loop.

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
