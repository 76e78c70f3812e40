"""Why calls are refused: what their callers are told, and the reason that is counted.

The texts name what the caller sent and has, never what the server holds: whether a buffer exists
isn't for those who may not see it.
"""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer import errors
from experience_buffer_server.access.grants import EVERY_BUFFER, Identity
from experience_buffer_server.access.policy import Rule, method_name

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


def unknown(names: Sequence[str], *, has_token: bool) -> RefusedError:
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


def malformed() -> RefusedError:
    """The authorization metadata can't be read."""
    return RefusedError(
        "unknown_token",
        errors.UnauthenticatedError(
            "the metadata must hold 'authorization: Bearer TOKEN' once and nothing else under "
            "that key"
        ),
    )


def expired(name: str) -> RefusedError:
    """All grants of the caller have ended."""
    text = f"the grant of {name!r} has expired; ask the server's operator for a new one"
    return RefusedError("expired", errors.UnauthenticatedError(text, subject=name), name)


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
