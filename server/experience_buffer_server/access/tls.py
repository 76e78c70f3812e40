"""The server's certificates: read, checked, and followed when their files change.

New connections take the newest files that could be read; connections that exist stay as they are.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from experience_buffer_server.settings.access import TlsSection
from experience_buffer_server.settings.server import ConfigurationError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Materials:
    """What one version of the files holds, checked."""

    certificates: bytes
    key: bytes
    client_authorities: bytes | None
    context: ssl.SSLContext
    """The same for the metrics endpoint."""


class Certificates:
    """The server's certificates. `load` belongs to one thread; all else any thread may use.

    Args:
        settings: The section of the configuration; it names a certificate.

    Raises:
        ConfigurationError: The files can't be used.
    """

    def __init__(self, settings: TlsSection) -> None:
        self._settings = settings
        self._materials = _read(settings)
        self._fetched = self._materials

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._settings.client_ca_file is not None

    @property
    def context(self) -> ssl.SSLContext:
        """For a connection that is accepted now."""
        return self._materials.context

    def load(self) -> None:
        """Take the files as they are now, for connections that come.

        Raises:
            ConfigurationError: They can't be used; those read before stay in force.
        """
        self._materials = _read(self._settings)

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port. The caller keeps them as long as the port: gRPC holds a bare pointer."""
        # The stub doesn't say that None stands for "as before".
        changed: Any = self._changed
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._fetched), changed, self.asks_clients
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What a new connection is to take; None: as before. gRPC's threads call it."""
        newest = self._materials
        if newest is self._fetched:
            return None
        self._fetched = newest
        return _configuration(newest)


def _configuration(materials: Materials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(materials.key, materials.certificates)], materials.client_authorities
    )


def _read(settings: TlsSection) -> Materials:
    certificate_file, key_file = settings.certificate_file, settings.key_file
    ca_file = settings.client_ca_file
    assert certificate_file is not None
    assert key_file is not None

    def contents() -> tuple[bytes, bytes, bytes | None]:
        return (
            _bytes("tls.certificate_file", certificate_file),
            _bytes("tls.key_file", key_file),
            None if ca_file is None else _bytes("tls.client_ca_file", ca_file),
        )

    before = contents()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password it would ask for one on the terminal.
        context.load_cert_chain(certificate_file, key_file, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"tls.certificate_file {certificate_file}, tls.key_file {key_file}: {error}; both must "
            "be PEM, belong together, and the key have no passphrase"
        ) from error
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"tls.client_ca_file {ca_file}: {error}; it must hold PEM certificates"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    if contents() != before:
        raise ConfigurationError("tls: the files changed while they were read")
    with contextlib.suppress(FileNotFoundError):  # Replaced at this moment: it is read again.
        if key_file.stat().st_mode & stat.S_IROTH:
            _log.warning("tls.key_file %s can be read by every user: chmod o-r", key_file)
    return Materials(*before, context)


def _bytes(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{key}: can't read {path}: {error.strerror}") from error
