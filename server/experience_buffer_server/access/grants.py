"""Who may do what: the grants of an access file, looked up by token or certificate.

Values only; the file is watched in `entrance`, the rule of each call is in `policy`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import tomllib
from collections.abc import Iterable, Set
from dataclasses import dataclass

from pydantic import ValidationError

from experience_buffer_server.settings.access import ROLES, AccessFile, GrantSettings, Role
from experience_buffer_server.settings.server import ConfigurationError, explain

EVERY_BUFFER = "*"
"""Stands for all buffers: in a grant, and as what a call on the whole server asks for."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Roles on buffers, until a time."""

    roles: frozenset[Role]
    """All that it allows: `operate` stands for every role."""
    names: frozenset[str]
    prefixes: tuple[str, ...]
    expires_time: float
    """Seconds since the epoch; infinity: never."""

    def covers(self, buffer: str) -> bool:
        """Whether it holds for this buffer, which needn't exist."""
        if buffer in self.names:
            return True
        return buffer != EVERY_BUFFER and buffer.startswith(self.prefixes)


@dataclass(frozen=True, slots=True)
class Identity:
    """One caller with all of its grants."""

    name: str
    grants: tuple[Grant, ...]
    roles: frozenset[str]
    """All that it may do, on whatever buffers."""
    expires_time: float
    """When the first of its grants ends."""

    def allows(self, roles: Set[str], buffer: str) -> bool:
        """Whether it has one of these roles on this buffer."""
        for grant in self.grants:
            if not grant.roles.isdisjoint(roles) and grant.covers(buffer):
                return True
        return False

    def covers(self, buffer: str) -> bool:
        """Whether it has any role on this buffer that lets it see the buffer."""
        return self.allows(_SEEING, buffer)

    def buffers(self, roles: Set[str]) -> str:
        """The buffers on which it has one of these roles, for a message."""
        covered = {
            text
            for grant in self.grants
            if not grant.roles.isdisjoint(roles)
            for text in (*grant.names, *(f"{prefix}*" for prefix in grant.prefixes if prefix))
        }
        return ", ".join(sorted(covered))


_SEEING = frozenset(("push", "sample", "look", "operate"))


class Grants:
    """All identities of one version of an access file. Immutable; any thread may read it."""

    def __init__(self, entries: Iterable[GrantSettings]) -> None:
        found: dict[tuple[bool, str], tuple[str, list[Grant]]] = {}
        for number, entry in enumerate(entries):
            key = (bool(entry.token_sha256), entry.token_sha256 or entry.certificate_name)
            name, grants = found.setdefault(key, (entry.name, []))
            if name != entry.name:
                raise ConfigurationError(
                    f"grants.{number}: {entry.name!r} has the credential of {name!r}; entries that "
                    "share one share their name"
                )
            grants.append(_grant(entry))
        self._tokens: dict[bytes, tuple[bytes, Identity]] = {}
        """By digest, each with the digest itself."""
        self._certificates: dict[str, Identity] = {}
        for (is_token, credential), (name, grants) in found.items():
            if is_token:
                digest = bytes.fromhex(credential)
                self._tokens[digest] = digest, _identity(name, grants)
            else:
                self._certificates[credential] = _identity(name, grants)

    @property
    def has_certificates(self) -> bool:
        """Whether a call without a token can be somebody's."""
        return bool(self._certificates)

    def by_token(self, digest: bytes, *, now: float) -> Identity | None:
        """Whose token has this SHA-256 digest; None: nobody's.

        How long the look-up takes tells nothing of use: it depends on the digest of what was sent,
        which nobody can choose. What is found is compared in constant time. An identity without
        grants has expired.
        """
        known, identity = self._tokens.get(digest, (b"", None))
        if identity is None or not hmac.compare_digest(digest, known):
            return None
        return _at(now, identity)

    def by_certificate(self, names: Iterable[str], *, now: float) -> Identity | None:
        """Whose verified certificate has one of these names; None: nobody's."""
        found = [self._certificates[name] for name in names if name in self._certificates]
        if not found:
            return None
        grants = [grant for identity in found for grant in identity.grants]
        return _at(now, found[0] if len(found) == 1 else _identity(found[0].name, grants))


def digest_of(token: str) -> bytes:
    """What is kept of a token: its SHA-256 digest, 32 bytes.

    A slow hash would add nothing: tokens are random and too long to be guessed.
    """
    return hashlib.sha256(token.encode()).digest()


def parse(text: str) -> Grants:
    """Read the text of an access file.

    Raises:
        ConfigurationError: It isn't TOML, has unknown keys, or values of the wrong form.
    """
    return Grants(read_entries(text))


def read_entries(text: str) -> tuple[GrantSettings, ...]:
    """The entries of an access file's text, in order.

    Raises:
        ConfigurationError: As for `parse`.
    """
    try:
        return AccessFile.model_validate(tomllib.loads(text)).grants
    except ValidationError as error:
        raise ConfigurationError(explain(error, of=AccessFile)) from error
    except (ValueError, RecursionError) as error:
        # Not TOMLDecodeError alone: numbers of too many digits, and dates that there aren't.
        raise ConfigurationError(str(error)) from error


def _grant(entry: GrantSettings) -> Grant:
    roles = frozenset(ROLES if "operate" in entry.roles else entry.roles)
    prefixes = tuple(text[:-1] for text in entry.buffers if text.endswith("*"))
    names = frozenset(text for text in entry.buffers if not text.endswith("*"))
    if EVERY_BUFFER in entry.buffers:
        names |= {EVERY_BUFFER}
    expires_time = math.inf if entry.expires is None else entry.expires.timestamp()
    return Grant(roles, names, prefixes, expires_time)


def _identity(name: str, grants: Iterable[Grant]) -> Identity:
    held = tuple(grants)
    roles = frozenset[str]().union(*(grant.roles for grant in held))
    return Identity(name, held, roles, min((g.expires_time for g in held), default=math.inf))


def _at(now: float, identity: Identity) -> Identity:
    """The identity with the grants that haven't ended."""
    if now < identity.expires_time:
        return identity
    return _identity(identity.name, [g for g in identity.grants if now < g.expires_time])
