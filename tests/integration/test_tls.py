"""TLS and client certificates on real servers: who gets in, who doesn't, and what a listener sees."""

from __future__ import annotations

import json
import pickle
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experience_buffer import (
    AsyncClient,
    Client,
    ClientOptions,
    ForbiddenError,
    RetryOptions,
    TlsOptions,
    UnauthenticatedError,
    UnavailableError,
)
from experience_buffer_server.commands.cli import application
from tests.integration.credentials import Authority, Pair, entry, refused_scrape, write
from tests.integration.plain import experience
from tests.integration.relay import Relay
from tests.integration.server import MakeServer, Server, eventually, serving

ONCE = ClientOptions(retry=RetryOptions(max_attempts=1))
TOKEN = "a-token-that-nobody-may-read"
MARK = "words-that-nobody-may-read"
LAST_YEAR = datetime.now(UTC) - timedelta(days=365)


def toml(pair: Pair, *, client_ca_file: str = "", access: bool = False) -> str:
    """The configuration of a server with these files."""
    lines = [
        "[tls]",
        f'certificate_file = "{pair.certificate_file}"',
        f'key_file = "{pair.key_file}"',
    ]
    if client_ca_file:
        lines.append(f'client_ca_file = "{client_ca_file}"')
    if access:
        lines += ["[access]", 'file = "access.toml"']
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder / "ours")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    """An authority that nobody here trusts."""
    return Authority(folder / "strange")


@pytest.fixture(scope="module")
def secured(folder: Path, authority: Authority) -> Iterator[Server]:
    """A server with TLS and tokens."""
    server = Server(folder / "secured", toml=toml(authority.issue("server"), access=True))
    grants = [entry("worker", "operate", token=TOKEN), entry("m", "metrics")]
    write(server.folder / "access.toml", *grants)
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def mutual(folder: Path, authority: Authority) -> Iterator[Server]:
    """A server that asks clients for certificates and knows two of them."""
    server = Server(
        folder / "mutual",
        toml=toml(authority.issue("mutual"), client_ca_file=authority.ca_file, access=True),
    )
    grants = [
        entry("worker", "push", certificate_name="worker-1"),
        entry("trainer", "sample", certificate_name="trainer.example"),
        entry("by-token", "sample", token=TOKEN),
        entry("m", "metrics", certificate_name="prometheus.example"),
    ]
    write(server.folder / "access.toml", *grants)
    # Of all that is tried here, nothing leaves a line of an error.
    with serving(server):
        yield server


def get_in(server: Server, tls: TlsOptions | None, *, token: str | None = None) -> None:
    """Make one call, once."""
    with Client(server.address, token=token, tls=tls, timeout=20, options=ONCE) as client:
        client.get_stats()


async def test_both_clients_speak_tls(secured: Server, authority: Authority) -> None:
    tls = authority.options()
    with Client(secured.address, token=TOKEN, tls=tls) as client:
        assert client.push([experience(1, 0)]).outcomes[0].status == "stored"
        with pickle.loads(pickle.dumps(client)) as copy, copy.stream(1) as batches:
            assert len(next(iter(batches)).uids) == 1
    async with AsyncClient(secured.address, token=TOKEN, tls=tls) as client:
        assert (await client.get_stats()).buffers[0].num_items == 1
    with pytest.raises(UnauthenticatedError):
        get_in(secured, tls)


def test_a_server_that_cannot_prove_its_name_gets_no_token(
    secured: Server, authority: Authority, stranger: Authority
) -> None:
    """A wrong authority, no authority at all, or a wrong name."""
    for tls in (
        stranger.options(),
        TlsOptions(),
        authority.options(server_name="buffer.example"),
    ):
        with pytest.raises(UnavailableError):
            get_in(secured, tls, token=TOKEN)
    get_in(secured, authority.options(server_name="localhost"), token=TOKEN)


def test_without_tls_nothing_is_served(secured: Server, mutual: Server) -> None:
    """Neither to a plain client nor to one that only listens."""
    for server in (secured, mutual):
        with pytest.raises(UnavailableError):
            get_in(server, None, token=TOKEN)
        for port in (server.port, server.metrics_port):
            for words in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port)) as plain:
                    plain.settimeout(40)
                    plain.sendall(words)
                    answer = _all_of(plain)
                    # At most an alert of TLS, which says that this isn't TLS.
                    assert len(answer) <= 7
                    assert answer[:1] in (b"", b"\x15")


def _all_of(plain: socket.socket) -> bytes:
    data = b""
    try:
        while part := plain.recv(4096):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_listener_on_the_network_reads_nothing(
    folder: Path, secured: Server, authority: Authority
) -> None:
    """The same relay reads both where there is no TLS, so that it would notice."""
    with serving(Server(folder / "plain")) as plain:
        seen = [
            _recorded(server, tls)
            for server, tls in [(secured, authority.options()), (plain, None)]
        ]
    assert all(len(data) > 3000 for data in seen)
    for word in (TOKEN, MARK, "authorization", "PushRequest", "experience_buffer.v1"):
        assert word.encode() not in seen[0]
    assert TOKEN.encode() in seen[1]
    assert MARK.encode() in seen[1]


def _recorded(server: Server, tls: TlsOptions | None) -> bytes:
    relay = Relay(server.port)
    try:
        with Client(relay.address, token=TOKEN, tls=tls) as client:
            client.push([experience(2, 0, info={"text": MARK * 100})])
            with client.stream(1) as batches:
                next(iter(batches))
    finally:
        relay.close()
    return relay.recorded


def test_only_a_certificate_of_the_right_authority_gets_in(
    mutual: Server, authority: Authority, stranger: Authority
) -> None:
    now = authority.issue("worker", "any.example", common_name="worker-1")
    for shown in (
        None,
        stranger.issue("worker", "any.example", common_name="worker-1"),
        authority.issue("late", "any.example", common_name="worker-1", not_after=LAST_YEAR),
    ):
        with pytest.raises(UnavailableError):
            get_in(mutual, authority.options(shown), token=TOKEN)
    get_in(mutual, authority.options(now))


def test_a_certificate_has_the_roles_of_its_name(mutual: Server, authority: Authority) -> None:
    worker = authority.options(authority.issue("worker-1", "any.example", common_name="worker-1"))
    trainer = authority.options(authority.issue("trainer", "other.example", "trainer.example"))
    nobody = authority.options(authority.issue("nobody", "nobody.example"))
    with Client(mutual.address, tls=worker) as client:
        assert client.push([experience(3, 0)]).outcomes[0].status == "stored"
        with pytest.raises(ForbiddenError, match="'worker' may not call Sample"):
            client.sample(1)
    with Client(mutual.address, tls=trainer) as client, client.stream(1) as batches:
        next(iter(batches))
    with pytest.raises(UnauthenticatedError, match=r"no grant is for the certificate of 'nobody"):
        get_in(mutual, nobody)
    # A token counts for more than a certificate, a wrong one too.
    with (
        Client(mutual.address, tls=worker, token=TOKEN) as client,
        pytest.raises(ForbiddenError, match="'by-token' may not call Push"),
    ):
        client.push([experience(4, 0)])
    with pytest.raises(UnauthenticatedError, match="unknown"):
        get_in(mutual, worker, token="nobody")


def test_new_certificates_are_taken_without_a_restart(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Connections stay, new ones take the new files; files that can't be used change nothing."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    first, second = old.issue("server"), new.issue("server")
    pair = Pair(str(tmp_path / "server.pem"), str(tmp_path / "server.key"))
    _install(pair, first)
    clients = tmp_path / "clients.pem"
    clients.write_bytes(Path(old.ca_file).read_bytes())
    server = make_server(toml=toml(pair, client_ca_file=str(clients)))
    mine = old.issue("client", "client.example")
    with Client(server.address, tls=old.options(mine)) as client:
        client.get_stats()
        Path(pair.key_file).write_bytes(Path(second.key_file).read_bytes()[:100])
        eventually(lambda: _reloads(server, "failed"), "the half-written key to be noticed")
        get_in(server, old.options(mine))
        clients.write_bytes(Path(new.ca_file).read_bytes())
        _install(pair, second)
        eventually(lambda: _reloads(server, "read again"), "the new files to be taken")
        client.get_stats()
        with pytest.raises(UnavailableError):
            get_in(server, old.options(mine))
        shown = new.issue("client", "client.example")
        get_in(server, new.options(shown))
        with pytest.raises(UnavailableError):
            get_in(server, TlsOptions(ca_file=new.ca_file, **_files(mine)))
        expired = new.issue("expired", not_after=LAST_YEAR)
        body = server.metrics(tls=_context(new.options(shown)))
        assert re.search(r'credential_reloads_total\{outcome="failed",section="tls"\} [1-9]', body)
        server.log.clear()
        _install(pair, expired)
        eventually(lambda: _reloads(server, "read again"), "the expired files to be taken")
        with pytest.raises(UnavailableError):
            get_in(server, new.options(shown))
        client.get_stats()


def _files(pair: Pair) -> dict[str, str]:
    return {"certificate_file": pair.certificate_file, "key_file": pair.key_file}


def _install(target: Pair, source: Pair) -> None:
    """Put files in the place of others, one at a time, as an operator would."""
    for there, here in zip(_files(target).values(), _files(source).values(), strict=True):
        beside = Path(f"{there}.new")
        beside.touch(mode=0o600)
        beside.write_bytes(Path(here).read_bytes())
        beside.rename(there)


def _reloads(server: Server, what: str) -> bool:
    messages = [
        json.loads(line)["message"] for line in tuple(server.log) if "access.entrance" in line
    ]
    wanted = "can't be used" if what == "failed" else what
    return any(wanted in message for message in messages)


def _context(tls: TlsOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.certificate_file is not None:
        context.load_cert_chain(tls.certificate_file, tls.key_file)
    return context


def test_metrics_have_the_same_certificates_and_rules(
    secured: Server, mutual: Server, authority: Authority, stranger: Authority
) -> None:
    assert "experience_buffer_items" in secured.metrics("m", tls=_context(authority.options()))
    with refused_scrape(401):
        secured.metrics(tls=_context(authority.options()))
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        secured.metrics("m", tls=_context(stranger.options()))
    shown = authority.issue("prometheus", "prometheus.example")
    assert "experience_buffer_items" in mutual.metrics(tls=_context(authority.options(shown)))
    worker = authority.issue("w", "a.example", common_name="worker-1")
    with refused_scrape(403):
        mutual.metrics(tls=_context(authority.options(worker)))
    for nobody in (None, stranger.issue("p", "prometheus.example")):
        with pytest.raises((OSError, ssl.SSLError)):
            mutual.metrics(tls=_context(authority.options(nobody)))


def test_silent_connections_do_not_keep_prometheus_out(
    secured: Server, authority: Authority
) -> None:
    """Neither those that never shake hands nor those that never ask; threads stay bounded."""
    tls, place = authority.options(), ("127.0.0.1", secured.metrics_port)
    silent = [socket.create_connection(place) for _ in range(60)]
    for number in range(60):
        connection = socket.create_connection(place)
        if number % 2:
            silent.append(connection)
            continue
        silent.append(_context(tls).wrap_socket(connection, server_hostname="localhost"))
    try:
        assert "experience_buffer_items" in secured.metrics("m", tls=_context(tls))
        threads = Path(f"/proc/{secured.pid}/task")
        assert len(list(threads.iterdir())) < 150
    finally:
        for connection in silent:
            connection.close()
    assert "experience_buffer_items" in secured.metrics("m", tls=_context(tls))


def test_the_health_command_takes_the_same_files(mutual: Server, authority: Authority) -> None:
    """And no token: health is open to all who can connect."""
    pair = authority.issue("checker", "checker.example")
    arguments = ["health", "--address", mutual.address, "--ca", authority.ca_file]
    shown = ["--certificate", pair.certificate_file, "--key", pair.key_file]
    run = CliRunner().invoke
    answer = run(application(), [*arguments, *shown])
    assert (answer.exit_code, answer.stdout) == (0, f"{mutual.address}: SERVING\n")
    assert run(application(), arguments).exit_code == 1
    half = run(application(), [*arguments, *shown[:2]])
    assert half.exit_code == 2
    assert "belong together" in " ".join(half.stderr.replace("│", " ").split())


def test_beyond_loopback_only_with_tls_and_callers_who_are_known(
    authority: Authority, make_server: MakeServer, tmp_path: Path
) -> None:
    """What else is refused is in the table of a unit test."""
    beyond = '[server]\nhost = "0.0.0.0"\nmetrics_host = "0.0.0.0"\n'
    pair = authority.issue("beyond")
    config = tmp_path / "server.toml"
    config.write_text(beyond + toml(pair), encoding="utf-8")
    command = [sys.executable, "-m", "experience_buffer_server", "serve", "--config", str(config)]
    refused = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2
    assert "everyone there could read, write and delete everything" in refused.stderr
    server = make_server(toml=beyond + toml(pair, client_ca_file=authority.ca_file))
    get_in(server, authority.options(authority.issue("client", "client.example")))


def test_a_unix_socket(make_server: MakeServer, tmp_path: Path) -> None:
    path = tmp_path / "buffer.sock"
    server = make_server(toml=f'[server]\nhost = "unix:{path}"\n')
    with Client(f"unix:{path}", token="unneeded") as client:
        client.get_stats()
    assert f'"address": "unix:{path}"' in server.tail()
