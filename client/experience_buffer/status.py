"""Errors to gRPC statuses and back, for the server's interceptor and for both clients.

The exact class travels as `google.rpc.ErrorInfo.reason`, next to the detail that other tools
expect for the status (BadRequest, ResourceInfo, ...), in the `grpc-status-details-bin` trailer.
No rule about retrying is here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from experience_buffer import errors
from experience_buffer._show import line, sparse
from experience_buffer.v1 import types_pb2

__all__ = [
    "DETAILS_KEY",
    "ERROR_DOMAIN",
    "MAX_MESSAGE_BYTES",
    "MAX_SUBJECT_BYTES",
    "RpcStatus",
    "from_request_error",
    "from_rpc_error",
    "to_request_error",
    "to_status",
]
__dir__ = __all__.copy

DETAILS_KEY: Final = "grpc-status-details-bin"
ERROR_DOMAIN: Final = "experience_buffer"
MAX_MESSAGE_BYTES: Final = 1024
"""Longer texts are cut: large trailers replace the status that they belong to."""
MAX_SUBJECT_BYTES: Final = 256

_CLASSES: Final = tuple(
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, errors.ExperienceBufferError)
    and value
    not in (errors.ExperienceBufferError, errors.PushRefusedError, errors.AnnotateRefusedError)
)
_BY_REASON: Final = {cls.reason: cls for cls in _CLASSES}
_BY_STATUS: Final[dict[str, type[errors.ExperienceBufferError]]] = {
    "OUT_OF_RANGE": errors.InvalidRequestError,
    **{cls.status: cls for cls in reversed(_CLASSES)},
}
"""The first class of each: those that come later refine it."""
_TOO_MANY_CALLS: Final = "Concurrent RPC limit exceeded"
"""What gRPC itself answers beyond a server's `max_calls`, without details: nothing was done."""
_CROWD_SECONDS: Final = 1.0
_CROWD_CURE: Final = (
    "the server has as many calls under way as server.max_calls allows: close streams and clients "
    "that aren't used, or raise the limit"
)
_CODE_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class RpcStatus(grpc.Status):
    """What a failed call ends with; fits `abort_with_status` of both kinds of context.

    Attributes:
        code: The status code.
        details: The error's text.
        trailing_metadata: One entry: the serialised `google.rpc.Status`, below 4 KiB.
    """

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]

    def __repr__(self) -> str:
        return line(sparse(self))


def to_status(error: errors.ExperienceBufferError) -> RpcStatus:
    """Translate an error into the status that a call ends with.

    Args:
        error: Any error of this package. Its text is cut at 1,024 bytes of UTF-8.
    """
    code = grpc.StatusCode[error.status]
    message = _cut(str(error), MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, message):
        status.details.add().Pack(detail)
    return RpcStatus(code, message, ((DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(
    error: grpc.RpcError, *, doing: str, is_stream: bool = False
) -> errors.ExperienceBufferError:
    """Translate what gRPC raised into the error that the server meant.

    Args:
        error: Raised by a sync or an async call.
        doing: Method and address, "push to host:50051"; opens texts that gRPC itself wrote.
        is_stream: The call is a stream. INTERNAL is then a broken stream unless the server said
            otherwise: a write that meets the end of the stream hides the server's status so
            (grpc/grpc#36066), and so does a proxy's reset. Reconnecting brings the true status.

    CANCELLED is a server that goes away unless the server said otherwise: so gRPC answers what
    no handler has accepted when it stops (grpc/grpc#41785). What the caller itself cancelled must
    not be brought here.
    """
    call: Any = error  # Both kinds of RpcError are calls; the sync stub doesn't say so.
    code: grpc.StatusCode = call.code()
    text = call.details() or ""
    reason, subject, delay = _read_details(call.trailing_metadata() or ())
    if reason not in _BY_REASON:
        cls = _BY_STATUS.get(code.name, errors.InternalServerError)
        is_broken = is_stream and code is grpc.StatusCode.INTERNAL
        if is_broken or code is grpc.StatusCode.CANCELLED:
            cls = errors.UnavailableError
        cure = cls.cure
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and text.startswith(_TOO_MANY_CALLS):
            delay, cure = _CROWD_SECONDS, _CROWD_CURE
        text = f"{doing} failed ({code.name}): {text}"
        return cls(f"{text}; {cure}" if cure else text, retry_delay_seconds=delay)
    return _class(reason, code)(text, subject=subject, retry_delay_seconds=delay)


def to_request_error(error: errors.ExperienceBufferError) -> types_pb2.RequestError:
    """Translate an error into the one that answers a single message of a stream.

    Args:
        error: Any error of this package.
    """
    return types_pb2.RequestError(
        code=grpc.StatusCode[error.status].value[0],
        message=_cut(str(error), MAX_MESSAGE_BYTES),
        retry_delay_seconds=error.retry_delay_seconds or 0.0,
        reason=error.reason,
        subject=_cut(error.subject, MAX_SUBJECT_BYTES),
    )


def from_request_error(error: types_pb2.RequestError) -> errors.ExperienceBufferError:
    """Translate the error that answers a single message of a stream.

    Args:
        error: The answer's.
    """
    code = _CODE_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    cls = _class(error.reason, code)
    return cls(
        error.message,
        subject=error.subject,
        retry_delay_seconds=error.retry_delay_seconds or None,
    )


def _class(reason: str, code: grpc.StatusCode) -> type[errors.ExperienceBufferError]:
    """The class of this reason if it belongs to the status, else the status's own."""
    named = _BY_REASON.get(reason)
    if named is not None and named.status == code.name:
        return named
    return _BY_STATUS.get(code.name, errors.InternalServerError)


def _details(error: errors.ExperienceBufferError, message: str) -> Iterable[Message]:
    subject = _cut(error.subject, MAX_SUBJECT_BYTES)
    yield error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata={"subject": subject} if subject else {}
    )
    if error.status == "INVALID_ARGUMENT":
        violation = error_details_pb2.BadRequest.FieldViolation(field=subject, description=message)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    elif error.status in ("NOT_FOUND", "ALREADY_EXISTS"):
        yield error_details_pb2.ResourceInfo(
            resource_type=error.resource_type, resource_name=subject
        )
    elif error.status == "FAILED_PRECONDITION":
        unmet = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason, subject=subject, description=message
        )
        yield error_details_pb2.PreconditionFailure(violations=[unmet])
    if error.retry_delay_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_delay_seconds * 1e9))
        yield retry


def _read_details(metadata: Iterable[Any]) -> tuple[str, str, float | None]:
    """Reason, subject and delay that the trailer names; empty and None where it names none."""
    blob = next((value for key, value in metadata if key == DETAILS_KEY), b"")
    reason, subject, delay = "", "", None
    try:
        for packed in status_pb2.Status.FromString(blob).details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if packed.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason, subject = info.reason, info.metadata.get("subject", "")
            elif packed.Unpack(retry):
                delay = retry.retry_delay.ToNanoseconds() / 1e9
    except DecodeError:
        return "", "", None
    return reason, subject, delay


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
