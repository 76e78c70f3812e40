"""Every error that the client raises and the server answers with.

One base class; each subclass is also the standard library's type that it refines, belongs to
exactly one status, and can be pickled. The translation to and from gRPC is in `status.py`.
"""

from __future__ import annotations

from experience_buffer._error_base import ExperienceBufferError as ExperienceBufferError
from experience_buffer.outcomes import AnnotateRefusedError as AnnotateRefusedError
from experience_buffer.outcomes import PushRefusedError as PushRefusedError

__all__ = [
    "AlreadyExistsError",
    "AnnotateRefusedError",
    "BufferFullError",
    "BufferNotFoundError",
    "CallCancelledError",
    "ConsumerNotFoundError",
    "DataLossError",
    "DeadlineExceededError",
    "ExperienceBufferError",
    "ExperienceNotFoundError",
    "ForbiddenError",
    "GroupNotFoundError",
    "InternalServerError",
    "InvalidRequestError",
    "LeaseNotFoundError",
    "MessageTooLargeError",
    "NotFoundError",
    "PushRefusedError",
    "ResourceExhaustedError",
    "TrxpError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
    "WrongStateError",
]
__dir__ = __all__.copy


class InvalidRequestError(ExperienceBufferError, ValueError):
    """An argument, option, filter or configuration is malformed; `subject` names it.

    The clients raise it before anything is sent.
    """

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class TrxpError(ExperienceBufferError, ValueError):
    """A TRXP payload is damaged, hostile or inconsistent; `subject` says where.

    `subject` is such as `"frame"`, `"metadata offset 123"`, `"items[3].info.when"` or
    `"tensor table '0:tokens'"`.

    Attributes:
        item: Index of the experience that the damage is confined to; None for the whole payload.
    """

    status = "INVALID_ARGUMENT"
    reason = "TRXP"

    item: int | None = None


class MessageTooLargeError(ExperienceBufferError, ValueError):
    """One experience, raw payload or annotation is larger than a message may be; it was not sent."""

    status = "INVALID_ARGUMENT"
    reason = "MESSAGE_TOO_LARGE"


class NotFoundError(ExperienceBufferError, LookupError):
    """What `subject` names does not exist."""

    status = "NOT_FOUND"
    reason = "NOT_FOUND"


class BufferNotFoundError(NotFoundError):
    """No buffer has this name."""

    reason = "BUFFER_NOT_FOUND"
    resource_type = "buffer"


class ConsumerNotFoundError(NotFoundError):
    """The buffer has no consumer of this name."""

    reason = "CONSUMER_NOT_FOUND"
    resource_type = "consumer"


class ExperienceNotFoundError(NotFoundError):
    """The buffer holds no experience with this uid."""

    reason = "EXPERIENCE_NOT_FOUND"
    resource_type = "experience"


class GroupNotFoundError(NotFoundError):
    """The buffer knows no group with this key."""

    reason = "GROUP_NOT_FOUND"
    resource_type = "group"


class LeaseNotFoundError(NotFoundError):
    """The lease has expired or was given back: its experiences are delivered again."""

    reason = "LEASE_NOT_FOUND"
    resource_type = "lease"


class AlreadyExistsError(ExperienceBufferError, ValueError):
    """The name is taken."""

    status = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"
    resource_type = "buffer"


class WrongStateError(ExperienceBufferError, RuntimeError):
    """What was asked is not possible in the present state of `subject`."""

    status = "FAILED_PRECONDITION"
    reason = "WRONG_STATE"


class ResourceExhaustedError(ExperienceBufferError, RuntimeError):
    """A limit is reached: bytes, items, streams, waiting calls, or a message's size."""

    status = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"
    cure = "if a message is too large, raise max_message_bytes on both sides or use smaller batches"


class BufferFullError(ResourceExhaustedError):
    """The buffer or the disk is full; it has room again after acks, or with higher limits."""

    reason = "BUFFER_FULL"


class UnavailableError(ExperienceBufferError, ConnectionError):
    """No server answers at the address, or it is starting or draining."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"
    cure = "check that the server runs there and that the address and the TLS settings are right"


class UnauthenticatedError(ExperienceBufferError, PermissionError):
    """The call carries no token, or one that the server doesn't know."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"
    cure = "pass token= with a token that the server knows"


class ForbiddenError(ExperienceBufferError, PermissionError):
    """The token is known and may not do this."""

    status = "PERMISSION_DENIED"
    reason = "FORBIDDEN"


class DataLossError(ExperienceBufferError, OSError):
    """A stored record is damaged and can't be read back."""

    status = "DATA_LOSS"
    reason = "DATA_LOSS"


class DeadlineExceededError(ExperienceBufferError, TimeoutError):
    """No answer, or no room in a writer's queue, within the time given."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"
    cure = "give the call more time with timeout="


class CallCancelledError(ExperienceBufferError, RuntimeError):
    """The client, writer or stream was closed before or during the call."""

    status = "CANCELLED"
    reason = "CANCELLED"


class UnsupportedError(ExperienceBufferError, NotImplementedError):
    """The server doesn't know this call."""

    status = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"
    cure = "use a server at least as new as this client"


class InternalServerError(ExperienceBufferError, RuntimeError):
    """A bug in the server; its log has the details under the id in the message."""

    status = "INTERNAL"
    reason = "INTERNAL_SERVER_ERROR"
