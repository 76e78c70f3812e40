"""docs/access.md works as it is written: its commands, its files, its Python."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experience_buffer import Client, ForbiddenError, TlsOptions
from experience_buffer_server.access.grants import parse, read_entries
from experience_buffer_server.access.guard import REASONS
from experience_buffer_server.commands.cli import application
from tests.integration.credentials import Authority
from tests.integration.plain import experience
from tests.integration.server import MakeServer

TEXT = (Path(__file__).parents[2] / "docs" / "access.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.+?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def block(kind: str, mark: str) -> str:
    """The first example of a kind that has a text in it."""
    found: str = next(text for name, text in BLOCKS if name == kind and mark in text)
    return found


def run(command: str) -> str:
    """Run a documented command as it stands, with its output going where it says."""
    words = shlex.split(command)
    target = words[words.index(">") + 1] if ">" in words else None
    result = CliRunner().invoke(application(), words[1 : words.index(">")] if target else words[1:])
    assert result.exit_code == 0, result.output
    if target:
        Path(target).write_text(result.stdout, encoding="utf-8")
    return result.stdout


def test_the_commands_the_configuration_and_the_client(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker gets a token, pushes over TLS, and does nothing else; then it is revoked."""
    folder = tmp_path / "server-0"
    folder.mkdir()
    monkeypatch.chdir(folder)
    authority = Authority(folder)
    pair = authority.issue("server", "buffer.example")
    (folder / "clients-ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    umask, new_worker, new_trainer, show, revoke = block("sh", "token new").strip().splitlines()
    assert umask == "umask 077"
    run(new_worker)
    run(new_trainer)
    shown = run(show)
    assert "worker" in shown
    assert "trainer" in shown
    server = make_server(toml=block("toml", "[tls]") + "\n[buffers.math]\n")
    code = block("python", "TlsOptions")
    assert 'token = Path("worker.token").read_text().strip()' in code
    options = re.search(r"tls=(TlsOptions\(.*?\))\)", code)
    assert options
    tls: TlsOptions = eval(options[1], {"TlsOptions": lambda ca_file: _mutual(authority, ca_file)})
    token = Path("worker.token").read_text(encoding="utf-8").strip()
    with Client(server.address, token=token, tls=tls) as client:
        assert client.push([experience(1, 0)], buffer="math").outcomes[0].status == "stored"
        with pytest.raises(ForbiddenError):
            client.sample(1, buffer="math")
    entry = read_entries((folder / "access.toml").read_text(encoding="utf-8"))[0]
    assert entry.token_sha256
    run(re.sub(r"--id \S+", f"--id {entry.token_sha256[:12]}", revoke))
    assert [one.name for one in read_entries(Path("access.toml").read_text("utf-8"))] == ["trainer"]
    assert Path(pair.certificate_file).name == "server.pem"


def _mutual(authority: Authority, ca_file: str) -> TlsOptions:
    """The documented options, and what the example's client_ca_file asks for beside them."""
    pair = authority.issue("client", "client.example")
    return TlsOptions(
        ca_file=ca_file,
        certificate_file=pair.certificate_file,
        key_file=pair.key_file,
        server_name="buffer.example",
    )


def test_the_entries_are_read() -> None:
    entries = read_entries(block("toml", "[[grants]]"))
    assert [entry.name for entry in entries] == ["worker", "trainer"]
    assert parse(block("toml", "[[grants]]")).has_certificates


def test_the_configuration_has_no_other_keys() -> None:
    assert tomllib.loads(block("toml", "[tls]")).keys() == {"server", "tls", "access"}


def test_all_reasons_are_named() -> None:
    listed = re.search(r"Refusals have the reasons (.+?), and are counted", TEXT, flags=re.DOTALL)
    assert listed
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == REASONS
