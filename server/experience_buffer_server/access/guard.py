"""The guard of a server: who calls, and whether they may.

It holds the grants in force; `calls` judges one call with them from its beginning to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from experience_buffer_server.access import refusals
from experience_buffer_server.access.audit import Audit, Event
from experience_buffer_server.access.grants import Grants, Identity
from experience_buffer_server.access.refusals import RefusedError

Metadata = Iterable[tuple[str, str | bytes]]
_MAX_TOKEN_LENGTH = 4096


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
        if grants is None:
            raise AssertionError("a server without grants lets everyone in")
        if digest is not None:
            identity = grants.by_token(digest, now=now)
        else:
            identity = grants.by_certificate(names, now=now)
        if identity is None:
            raise refusals.unknown(names, has_token=digest is not None)
        if not identity.grants:
            raise refusals.expired(identity.name)
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
    text = found[0]
    if len(found) > 1 or not isinstance(text, str) or len(text) > _MAX_TOKEN_LENGTH:
        raise refusals.malformed()
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise refusals.malformed()
    return token.strip()
