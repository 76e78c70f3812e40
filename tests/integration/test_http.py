"""HTTP of a real server: with TLS, tokens and certificates of clients, with a tokenizer, and at its end."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from experience_buffer import EID, Client, Experience, trxp
from tests.integration.credentials import Authority, Pair, entry, write
from tests.integration.server import MakeServer, Server, command, eventually
from tests.unit.web.inside.test_texts import bytes_level


def get(
    server: Server, path: str, *, tls: ssl.SSLContext | None = None, token: str = ""
) -> tuple[int, Any]:
    """The status, and the JSON that came with it."""
    url = f"{'https' if tls else 'http'}://localhost:{server.metrics_port}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def secured(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca_file)
    if pair is not None:
        context.load_cert_chain(pair.certificate_file, pair.key_file)
    return context


def test_over_tls_a_certificate_or_a_token_says_who_looks(
    make_server: MakeServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    pair, looker = authority.issue("server"), authority.issue("looker", "looker.example")
    write(
        tmp_path / "server-0" / "access.toml",
        entry("by-certificate", "look", certificate_name="looker.example", buffers=["default"]),
        entry("by-token", "metrics"),
    )
    server = make_server(
        toml=f'[tls]\ncertificate_file = "{pair.certificate_file}"\nkey_file = "{pair.key_file}"\n'
        f'client_ca_file = "{authority.ca_file}"\n[access]\nfile = "access.toml"\n'
    )
    known, stranger = (
        secured(authority, looker),
        secured(authority, authority.issue("x", "x.example")),
    )
    status, answer = get(server, "/api/v1/status", tls=known)
    assert (status, answer["caller"], answer["is_secure"]) == (200, "by-certificate", True)
    assert get(server, "/api/v1/buffers/default/experiences", tls=known)[0] == 200
    assert get(server, "/api/v1/buffers/default/stats", tls=stranger)[0] == 401
    status, answer = get(server, "/api/v1/buffers/default/stats", tls=stranger, token="by-token")
    assert (status, answer["error"]["reason"]) == (403, "FORBIDDEN")
    with pytest.raises((OSError, ssl.SSLError)):
        get(server, "/health", tls=secured(authority))
    # A new certificate holds from the next connection on.
    renewed = Authority(tmp_path / "renewed")
    fresh = renewed.issue("server")
    for old, new in (
        (pair.certificate_file, fresh.certificate_file),
        (pair.key_file, fresh.key_file),
    ):
        Path(new).replace(old)
    eventually(lambda: "read again" in server.tail(), "the files to be read again")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        get(server, "/api/v1/status", tls=known)
    assert get(server, "/api/v1/status", tls=secured(renewed, looker))[0] == 200


def test_a_tokenizer_gives_texts(make_server: MakeServer, tmp_path: Path) -> None:
    path = bytes_level(tmp_path)
    server = make_server(toml=f'[server]\ntokenizer = "{path}"\n')
    ids = Tokenizer.from_file(str(path)).encode("the answer 🙂").ids
    with Client(server.address) as client:
        eid = EID(batch=1, task=2, run=3, suffix="a")
        client.push(
            [Experience(eid=eid, prompt=ids[:1], response=ids[1:], logprobs=[0.0] * len(ids[1:]))]
        )
    assert get(server, "/api/v1/status")[1]["has_tokenizer"]
    _, answer = get(server, "/api/v1/buffers/default/experience/tokens?part=all&uid=1/2/3/0/a")
    assert "".join(answer["texts"]) == "the answer 🙂"


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_tokenizer_that_is_none_ends_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    ended = command(
        "serve", "--data", tmp_path / "data", "--port", 0, "--metrics-port", 0, "--tokenizer", path
    )
    assert ended.returncode == 2
    assert "server.tokenizer" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = command("serve", "--data", tmp_path / "data", "--port", 0, "--metrics-port", port)
    assert ended.returncode == 2
    assert f"server.metrics_port: can't listen on 127.0.0.1:{port}" in ended.stderr


def test_open_tabs_and_silent_connections_don_t_delay_the_end(make_server: MakeServer) -> None:
    server = make_server()
    place = ("127.0.0.1", server.metrics_port)
    with socket.create_connection(place) as tab, socket.create_connection(place):
        tab.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = b""
        while b"event: overview" not in said:
            said += tab.recv(4096)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 5.0
        rest = b""
        while more := tab.recv(4096):
            rest += more
        assert b"event: end" in rest
    assert not [line for line in server.log if '"ERROR"' in line or "Traceback" in line]


def test_an_experience_as_large_as_they_come_is_looked_at(
    shared_server: Server, client: Client, name: str
) -> None:
    """131,072 tokens; none of it in the way of anybody else."""
    count = 131_072
    client.create_buffer(name)
    eid = EID(batch=1, task=2, run=3, suffix="long")
    client.push(
        [
            Experience(
                eid=eid,
                prompt=[1],
                response=list(range(count)),
                logprobs=[-0.5] * count,
                advantages=[(place % 7 - 3) / 3 for place in range(count)],
            )
        ],
        buffer=name,
    )
    base, uid = f"/api/v1/buffers/{name}/experience", "1/2/3/0/long"
    _, tokens = get(shared_server, f"{base}/tokens?start=131000&count=4096&uid={uid}")
    assert tokens["ids"] == list(range(131_000, count))
    assert tokens["columns"]["advantages"][0] == pytest.approx((131_000 % 7 - 3) / 3, rel=1e-5)
    _, strip = get(shared_server, f"{base}/overview?points=1400&uid={uid}")
    assert len(strip["starts"]) == 1400
    url = f"http://localhost:{shared_server.metrics_port}{base}/payload?uid={uid}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert trxp.decode(answer.read())[0].eid == eid
