"""What the configuration says about access, and the form of an access file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from experience_buffer_server.settings.consumer import Name, Section, spelled

Role = Literal["push", "sample", "look", "operate", "metrics"]
ROLES: tuple[Role, ...] = ("push", "sample", "look", "operate", "metrics")
Pattern = Annotated[
    str,
    spelled(
        r"[A-Za-z0-9._-]{1,64}\*?|\*", "a buffer's name, the beginning of names and '*', or '*'"
    ),
]
"""A buffer's name, the beginning of names and a star, or a star for all."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class TlsSection(Section):
    """Certificates of the server, for its gRPC service and its metrics endpoint."""

    certificate_file: Path | None = None
    """PEM: the server's certificate, then those that link it to its authority."""
    key_file: Path | None = None
    """PEM: the private key of the certificate, without a passphrase."""
    client_ca_file: Path | None = None
    """PEM: authorities of clients; with it, clients must show a certificate of one of them."""

    @property
    def paths(self) -> list[Path]:
        """All files that are named."""
        files = (self.certificate_file, self.key_file, self.client_ca_file)
        return [path for path in files if path is not None]

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file belong together: give both or neither")
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("client_ca_file needs certificate_file and key_file")
        return self


class AccessSection(Section):
    """Who may do what."""

    file: Path | None = None
    """TOML file of grants; without it everyone who can connect may do everything."""


class GrantSettings(Section):
    """One entry of an access file: whom it is for, and what it allows."""

    name: Name
    token_sha256: str = ""
    certificate_name: str = Field("", max_length=256)
    roles: tuple[Role, ...] = Field(min_length=1)
    buffers: tuple[Pattern, ...] = ("*",)
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if bool(self.token_sha256) == bool(self.certificate_name):
            raise ValueError("give either token_sha256 or certificate_name")
        if self.token_sha256 and not _DIGEST.fullmatch(self.token_sha256):
            raise ValueError("token_sha256 must be a SHA-256 digest: 64 characters of 0-9 and a-f")
        if not self.buffers:
            raise ValueError('buffers is empty: name some, or leave it out for ["*"]')
        return self


class AccessFile(Section):
    """The content of an access file."""

    grants: tuple[GrantSettings, ...] = ()
