"""The guard of a server: who calls, and whether they may.

It holds the grants in force; `calls` judges one call with them from its beginning to its end. The
texts of refusals name what the caller sent and has, never what the server holds: whether a buffer
exists isn't for those who may not see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.access.audit import Audit, Event
from experience_buffer_server.access.grants import EVERY_BUFFER, Grants, Identity
from experience_buffer_server.access.policy import Rule, method_name

Metadata = Iterable[tuple[str, str | bytes]]
_MAX_TOKEN_LENGTH = 4096
REASONS = (
    "no_token", "unknown_token", "unknown_certificate", "expired", "role", "buffer", "unlisted"
)  # fmt: skip
"""All that are counted."""


class RefusedError(Exception):
    """A call is refused.

    Args:
        reason: One of `REASONS`.
        error: What the caller gets.
        who: The caller's name where it is known.
    """

    def __init__(
        self, reason: str, error: errors.UnauthenticatedError | errors.ForbiddenError, who: str = ""
    ) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error
        self.who = who


class OpenCall(Protocol):
    """A call under way."""

    expires_time: float
    """Seconds since the epoch at which its grants have to be looked at again."""

    def judge_again(self) -> None:
        """End it if its caller may not make it any more."""


class Guard:
    """Judges all calls of a server. Belongs to its event loop; `identify` and `report` to any thread.

    Args:
        grants: Who may do what; None: everyone everything.
        audit: Where refusals are logged.
        shows_certificates: Clients show certificates, which are verified.
        count: Called with the method and the reason of each refused call.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        grants: Grants | None,
        audit: Audit,
        *,
        shows_certificates: bool,
        count: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.grants = grants
        self.audit = audit
        self.shows_certificates = shows_certificates
        self.clock = clock
        self.open_calls: set[OpenCall] = set()
        self._count = count

    @property
    def knows_certificates(self) -> bool:
        """Whether a call without a token may have a grant."""
        return self.shows_certificates and self.grants is not None and self.grants.has_certificates

    def replace(self, grants: Grants) -> None:
        """Go on with other grants; calls under way that they don't allow end."""
        self.grants = grants
        for call in tuple(self.open_calls):
            call.judge_again()

    def tick(self) -> None:
        """End calls under way whose grants have expired."""
        self.audit.tick()
        now = self.clock()
        for call in [call for call in self.open_calls if call.expires_time <= now]:
            call.judge_again()

    def identify(self, digest: bytes | None, names: Sequence[str]) -> Identity:
        """Who has the token with this digest, or else a verified certificate of these names.

        Raises:
            RefusedError: Nobody, or the grants have expired.
        """
        grants, now = self.grants, self.clock()
        assert grants is not None, "a server without grants lets everyone in"
        if digest is not None:
            identity = grants.by_token(digest, now=now)
        else:
            identity = grants.by_certificate(names, now=now)
        if identity is None:
            raise _unknown(names, has_token=digest is not None)
        if not identity.grants:
            name = identity.name
            text = f"the grant of {name!r} has expired; ask the server's operator for a new one"
            raise RefusedError("expired", errors.UnauthenticatedError(text, subject=name), name)
        return identity

    def report(self, refused: RefusedError, event: Event) -> None:
        """Count and log a refused call."""
        self._count(event.method, refused.reason)
        self.audit.refused(event, refused.reason)


def token_of(metadata: Metadata) -> str | None:
    """The token that the metadata of a call carries; None: none.

    Raises:
        RefusedError: There is an authorization that isn't one token.
    """
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    text = found[0] if len(found) == 1 else ""
    scheme, _, token = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip() or len(text) > _MAX_TOKEN_LENGTH:
        raise RefusedError(
            "unknown_token",
            errors.UnauthenticatedError(
                "the metadata must hold 'authorization: Bearer TOKEN' once and nothing else under "
                "that key"
            ),
        )
    return token.strip()


def _unknown(names: Sequence[str], *, has_token: bool) -> RefusedError:
    """Nobody's token, nobody's certificate, or neither was shown."""
    if has_token:
        reason, text = "unknown_token", "the token is unknown to this server, or was revoked"
    elif names:
        reason, text = "unknown_certificate", f"no grant is for the certificate of {names[0]!r}"
    else:
        reason = "no_token"
        text = "the call carries no token: pass token= to the client, or send the metadata "
        text += "'authorization: Bearer TOKEN'"
    return RefusedError(
        reason, errors.UnauthenticatedError(text + "; tokens come from the server's operator")
    )


def wrong_role(identity: Identity, rule: Rule, method: str) -> RefusedError:
    """The caller has no role, on no buffer, that may make this call."""
    text = (
        f"{identity.name!r} may not call {method_name(method)}: that takes the role "
        f"{_either(rule)}, it has {', '.join(sorted(identity.roles))}"
    )
    return RefusedError("role", errors.ForbiddenError(text, subject=identity.name), identity.name)


def wrong_buffer(identity: Identity, rule: Rule, method: str, buffer: str) -> RefusedError:
    """The caller may make this call, but not for this buffer."""
    where = "the whole server" if buffer == EVERY_BUFFER else f"buffer {buffer!r}"
    text = (
        f"{identity.name!r} may not call {method_name(method)} for {where}: that takes the role "
        f"{_either(rule)} there, it has it for {identity.buffers(rule.roles)}"
    )
    return RefusedError("buffer", errors.ForbiddenError(text, subject=buffer), identity.name)


def unlisted(identity: Identity, method: str) -> RefusedError:
    """No role may make this call."""
    text = f"{method_name(method)} is open to no role; the server's policy has no rule for it"
    return RefusedError("unlisted", errors.ForbiddenError(text), identity.name)


def _either(rule: Rule) -> str:
    return " or ".join(sorted({*rule.roles, "operate"}))
