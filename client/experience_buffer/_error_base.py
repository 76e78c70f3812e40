"""The base of all errors, for `outcomes` and `errors`, which has it with all others."""

from __future__ import annotations

from typing import ClassVar


class ExperienceBufferError(Exception):
    """The base of all errors of this package.

    The text says what was wrong, where, which limit, and what to do about it.

    Attributes:
        status: Name of the `grpc.StatusCode` that carries this error.
        reason: Names this class on the wire (`google.rpc.ErrorInfo.reason`); part of the contract.
        resource_type: What kind of thing `subject` names, for errors about a thing.
        cure: What to do, added to messages that gRPC itself wrote.
        subject: What it is about: a buffer's name, a uid, a lease id, an argument of a verb.
        retry_delay_seconds: When the same call may be tried again; None when that can't help.

    Args:
        message: The text.
    """

    __module__ = "experience_buffer.errors"  # Where everyone finds it, and pickles look for it.

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    resource_type: ClassVar[str] = ""
    cure: ClassVar[str] = ""

    def __init__(
        self, message: str = "", *, subject: str = "", retry_delay_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.subject = subject
        self.retry_delay_seconds = retry_delay_seconds
