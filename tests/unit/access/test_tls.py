"""The files of certificates: which are taken, which are refused, and what they are refused for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.settings.access import TlsSection
from experience_buffer_server.settings.server import ConfigurationError
from tests.integration.credentials import Authority


@pytest.fixture
def files(tmp_path: Path) -> TlsSection:
    """Files that can be used."""
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    return TlsSection.model_validate(
        {
            "certificate_file": pair.certificate_file,
            "key_file": pair.key_file,
            "client_ca_file": authority.ca_file,
        }
    )


def _path(files: TlsSection, key: str) -> Path:
    path: Path = getattr(files, key)
    return path


def _with_another_key(files: TlsSection) -> None:
    other = Authority(_path(files, "key_file").parent / "other").issue("server")
    _path(files, "key_file").write_bytes(Path(other.key_file).read_bytes())


def _with_a_passphrase(files: TlsSection) -> None:
    from cryptography.hazmat.primitives import serialization

    path = _path(files, "key_file")
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda files: _path(files, "key_file").unlink(), "tls.key_file: can't read"),
        (lambda files: _path(files, "certificate_file").unlink(), "certificate_file: can't read"),
        (lambda files: _path(files, "client_ca_file").unlink(), "tls.client_ca_file: can't read"),
        (lambda files: _path(files, "key_file").write_text("x"), "must be PEM, belong together"),
        (lambda files: os.truncate(_path(files, "key_file"), 100), "must be PEM, belong together"),
        (lambda files: os.truncate(_path(files, "certificate_file"), 100), "must be PEM"),
        (lambda files: _path(files, "client_ca_file").write_text("x"), "must hold PEM"),
        (_with_another_key, "belong together"),
        (_with_a_passphrase, "the key have no passphrase"),
    ],
)
def test_files_that_cannot_be_used_are_refused_and_change_nothing(
    spoil: Callable[[TlsSection], object], problem: str, files: TlsSection
) -> None:
    certificates = Certificates(files)
    context = certificates.context
    spoil(files)
    with pytest.raises(ConfigurationError, match=problem):
        certificates.load()
    assert certificates.context is context
    assert certificates._changed() is None
    with pytest.raises(ConfigurationError, match=problem):
        Certificates(files)


def test_what_was_read_is_given_to_grpc_once(files: TlsSection) -> None:
    certificates = Certificates(files)
    assert certificates.asks_clients
    assert certificates._changed() is None
    certificates.load()
    assert certificates._changed() is not None
    assert certificates._changed() is None


def test_a_key_that_all_may_read_is_warned_of(
    files: TlsSection, caplog: pytest.LogCaptureFixture
) -> None:
    Certificates(files)
    assert not caplog.records
    _path(files, "key_file").chmod(0o604)
    Certificates(files)
    assert "can be read by every user: chmod o-r" in caplog.text
