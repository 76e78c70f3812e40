"""One call under guard, from its metadata to its end.

It is judged by its token before a byte of its request is read, by its certificate when its handler
begins, and by the buffer that each of its messages names. A call under way ends with its grant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from experience_buffer import errors
from experience_buffer_server.access import policy
from experience_buffer_server.access.audit import Event, described
from experience_buffer_server.access.grants import Grants, Identity, digest_of
from experience_buffer_server.access.guard import (
    Guard,
    Metadata,
    RefusedError,
    token_of,
    unlisted,
    wrong_buffer,
    wrong_role,
)
from experience_buffer_server.access.policy import Rule
from experience_buffer_server.runtime import callers
from experience_buffer_server.runtime.callers import Caller, address_of
from experience_buffer_server.settings.consumer import MAX_NAME_CHARS
from experience_buffer_server.store.errors import as_client_error
from experience_buffer_server.store.interface import StoreError

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


COMMON_NAME = "x509_common_name"
OTHER_NAMES = "x509_subject_alternative_name"
"""As gRPC calls them."""
_SENDING_SECONDS = 5.0
"""For a peer to read what is being sent to it, once its grant has ended."""
_MAX_BUFFERS = 128
"""More than a stream has messages under way."""


class GuardedCall:
    """One call; a context manager around its handler. Not thread-safe.

    `entered` first, then `with`; in it, `check` for each request.
    """

    __slots__ = (
        "_buffer", "_buffers", "_details", "_digest", "_grants", "_guard", "_identity",
        "_is_reported", "_is_sending", "_name", "_names", "_needs_grant", "_peer", "_refused",
        "_rule", "_task", "expires_time", "method",
    )  # fmt: skip

    def __init__(self, guard: Guard, method: str, metadata: Metadata) -> None:
        self.method = method
        self.expires_time = math.inf
        self._guard = guard
        self._rule: Rule | None = policy.RULES.get(method)
        self._needs_grant = guard.grants is not None and not self.is_anonymous
        self._grants: Grants | None = None
        """Those that it was allowed by."""
        self._digest: bytes | None = None
        self._names: tuple[str, ...] = ()
        self._name = ""
        self._identity: Identity | None = None
        self._refused: RefusedError | None = None
        self._is_reported = False
        self._buffer: str | None = None
        self._buffers: dict[str, None] = {}
        """Those named before, the last one last: their messages may be under way."""
        self._details: dict[str, object] | None = None
        """What an audited request asks for, once it is allowed."""
        self._peer = ""
        self._task: asyncio.Task[Any] | None = None
        self._is_sending = False
        if not self._needs_grant:
            return
        try:
            token = token_of(metadata)
            self._digest = None if token is None else digest_of(token)
            if token is not None or not guard.knows_certificates:
                self._judge()
        except RefusedError as refused:
            self._refused = refused

    @property
    def is_anonymous(self) -> bool:
        """Whether anybody may make it, without a grant even where there are some."""
        return self._rule is not None and not self._rule.roles

    @property
    def is_refused(self) -> bool:
        """Whether it is refused already, so that nothing of it need be read."""
        return self._refused is not None

    @property
    def max_request_bytes(self) -> int:
        """The most that one of its requests may have; 0: `server.max_message_bytes`."""
        return 0 if self._rule is None else self._rule.max_request_bytes

    def entered(self, context: Context) -> GuardedCall:
        """Say who calls, for the handler and all that it starts.

        Raises:
            UnauthenticatedError: Nobody that is known.
            ForbiddenError: The caller may not make this call.
        """
        peer = self._peer = context.peer()
        if self._guard.shows_certificates and self._digest is None:
            self._names = names_of(context.auth_context())
        try:
            if self._refused is not None:
                raise self._refused
            if self._needs_grant and self._grants is not self._guard.grants:
                self._judge()
        except RefusedError as refused:
            raise self._reported(refused) from None
        if self._identity is not None:
            caller = Caller(self._identity.name, peer, self._identity.covers)
        else:
            caller = Caller(self._names[0] if self._names else address_of(peer), peer)
        self._name = caller.name
        callers.entered(caller)
        return self

    def __enter__(self) -> GuardedCall:
        if self._identity is not None:
            self._task = asyncio.current_task()
            self._guard.open_calls.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._guard.open_calls.discard(self)
        task, self._task = self._task, None
        is_allowed = self._refused is None or self._details is not None
        if self._rule is not None and self._rule.is_audited and is_allowed:
            # Also when its grant ended meanwhile: what it does may have been done.
            self._guard.audit.administered(
                self._event(self._name),
                _outcome(error),
                self._details or {},
                is_bounded="operate" not in self._rule.roles,
            )
        if self._refused is not None:
            refusal = self._reported(self._refused)
            if isinstance(error, asyncio.CancelledError) and task is not None:
                task.uncancel()
                raise refusal from None

    # --- what it says and is sent

    def check(self, request: Any) -> Any:
        """The request, if its caller may make it.

        Raises:
            UnauthenticatedError: The caller's grant has ended meanwhile.
            ForbiddenError: The caller may not make it for this buffer.
        """
        if self._refused is not None:
            raise self._reported(self._refused)
        rule = self._rule
        if rule is None:
            return request
        buffer = rule.buffer(request)
        if buffer is not None:
            # It is kept, and may be as long as a message: a name is shorter than what is left of it.
            buffer = buffer[: MAX_NAME_CHARS + 1]
            if buffer != self._buffer:
                self._remember(buffer)
        if self._needs_grant:
            try:
                self._judge()
            except RefusedError as refused:
                raise self._reported(refused) from None
        if rule.is_audited:
            self._details = described(request)
        return request

    def _remember(self, buffer: str) -> None:
        self._buffer = buffer
        self._buffers.pop(buffer, None)
        self._buffers[buffer] = None
        if len(self._buffers) > _MAX_BUFFERS:
            del self._buffers[next(iter(self._buffers))]

    def sending(self) -> None:
        """A response is about to be sent."""
        self._is_sending = True

    def sent(self) -> None:
        """A response has been sent.

        Raises:
            UnauthenticatedError: The caller's grant has ended meanwhile.
            ForbiddenError: It doesn't cover the call any more.
        """
        self._is_sending = False
        if self._refused is not None:
            raise self._reported(self._refused)

    # --- whether it may

    def judge_again(self) -> None:
        """End it if its caller may not make it any more."""
        try:
            self._judge()
        except RefusedError as refused:
            self._refused = refused
            self._guard.open_calls.discard(self)
            if self._task is None:
                return
            if not self._is_sending:
                self._task.cancel()
                return
            # While gRPC sends for it, its task isn't ours to cancel: `sent` ends it, unless its peer
            # doesn't read.
            asyncio.get_running_loop().call_later(_SENDING_SECONDS, self._end_sending)

    def _end_sending(self) -> None:
        if self._task is not None and self._is_sending:
            self._task.cancel()

    def _judge(self) -> None:
        """Allow it as far as it has come, by the grants in force.

        Raises:
            RefusedError: They don't; nothing has changed.
        """
        grants, identity, rule = self._guard.grants, self._identity, self._rule
        is_new = (
            identity is None
            or grants is not self._grants
            or self.expires_time <= self._guard.clock()
        )
        if is_new:
            identity = self._guard.identify(self._digest, self._names)
        assert identity is not None
        if rule is None:
            raise unlisted(identity, self.method)
        if identity.roles.isdisjoint(rule.roles):
            raise wrong_role(identity, rule, self.method)
        named = () if self._buffer is None else (self._buffer,)
        for buffer in self._buffers if is_new else named:
            if not identity.allows(rule.roles, buffer):
                raise wrong_buffer(identity, rule, self.method, buffer)
        self._grants, self._identity = grants, identity
        self.expires_time = identity.expires_time

    def _reported(self, refused: RefusedError) -> errors.ExperienceBufferError:
        """What its caller gets; the first time it is counted and logged."""
        self._refused = refused
        if self._is_reported:
            return refused.error
        self._is_reported = True
        known = refused.who or ("" if self._identity is None else self._identity.name)
        name = known or (self._names[0] if self._names else address_of(self._peer))
        self._guard.report(refused, self._event(name, is_known=bool(known)))
        return refused.error

    def _event(self, who: str, *, is_known: bool = True) -> Event:
        method = policy.method_name(self.method)
        return Event(
            who=who, peer=self._peer, method=method, buffer=self._buffer or "", is_known=is_known
        )


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names in the certificate that a client has shown: its common name, then all others."""
    found = (*auth_context.get(COMMON_NAME, ()), *auth_context.get(OTHER_NAMES, ()))
    return tuple(name.decode("utf-8", "replace") for name in found if name)


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, (errors.ExperienceBufferError, StoreError)):
        return as_client_error(error).status
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
