"""Access files, and certificates of authorities of the test's own."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from experience_buffer import TlsOptions
from experience_buffer_server.access.access_file import as_toml
from experience_buffer_server.access.grants import digest_of
from experience_buffer_server.settings.access import GrantSettings

Entry = Mapping[str, Any]


def entry(name: str, *roles: str, token: str = "", **values: Any) -> Entry:
    """An entry of an access file; the token is the name unless it is given."""
    credential = {} if "certificate_name" in values else {"token_sha256": sha256(token or name)}
    return {"name": name, "roles": roles} | credential | values


def sha256(token: str) -> str:
    """What an access file keeps of a token."""
    return digest_of(token).hex()


def write(path: Path, *entries: Entry) -> None:
    """Write an access file at once."""
    text = "\n".join(as_toml(GrantSettings.model_validate(one)) for one in entries)
    beside = path.with_suffix(".new")
    beside.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(text, encoding="utf-8")
    beside.chmod(0o600)
    beside.rename(path)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key."""

    certificate_file: str
    key_file: str


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, stem: str, *names: str, **options: Any) -> Pair:
        """Write a certificate; all options are of `trustme.CA.issue_cert`."""
        issued = self._ca.issue_cert(*(names or ("localhost", "127.0.0.1")), **options)
        pair = Pair(str(self._folder / f"{stem}.pem"), str(self._folder / f"{stem}.key"))
        Path(pair.key_file).touch(mode=0o600)
        issued.private_key_pem.write_to_path(pair.key_file)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        Path(pair.certificate_file).write_bytes(chain)
        return pair

    def options(self, pair: Pair | None = None, **more: Any) -> TlsOptions:
        """How a client checks the server, and what it shows."""
        shown = (
            {"certificate_file": pair.certificate_file, "key_file": pair.key_file} if pair else {}
        )
        return TlsOptions(ca_file=self.ca_file, **shown, **more)


@contextmanager
def refused_scrape(status: int, text: str = "") -> Iterator[None]:
    """A scrape that is refused with this status and these words."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        yield
    with caught.value as error:
        assert error.code == status
        assert text in error.read().decode()
