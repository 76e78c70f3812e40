"""Whatever is asked, in whatever bytes: an answer of the caller's fault, no defect, nothing logged."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, uid
from tests.unit.web.asking import asking

_VALUES = (
    *("", "0", "-1", "1e999", "nan", "-inf", "9" * 30, "%00", "%ff%fe", "true", "ready", "stuck"),
    *("%F0%9F%99%82", "a" * 5000, uid(1, 0), "1.5", str(2**63), str(2**64), "%2e%2e/", "1_0"),
    *("x%0d%0aSet-Cookie:%20a", "%EF%BC%90", "response", "open"),
)
_HEADERS = (
    *("Host: localhost", "Host: 127.0.0.1:1", "Host: evil.example", "Host: localhost\r\nHost: b"),
    *("Host: localhost\r\nAccept: text/html", "Host: localhost\r\nAuthorization: Bearer x"),
    "Host: localhost\r\nContent-Length: 5\r\nContent-Type: application/json",
    "Host: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json",
    "Host: localhost\r\nAccept: application/openmetrics-text; version=x",
    "Host: localhost\r\nIf-None-Match: \x80, *",
)
_METHODS = ("GET", "GET", "GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS", "NONSENSE")
_BODIES = ("", '{"experiences": [', "5\r\nhello\r\n0\r\n\r\n", "hello")


def request(chance: random.Random, addresses: list[tuple[str, list[str]]]) -> bytes:
    """One request: an address that there is, parameters that may be its own, and then perhaps damage."""
    path, names = chance.choice(addresses)
    path = path.replace("{buffer}", "math").replace("{consumer}", chance.choice(_VALUES))
    path = path.replace("{step}", chance.choice(_VALUES))
    query = "&".join(
        f"{chance.choice([*names, 'nonsense'])}={chance.choice(_VALUES)}"
        for _ in range(chance.randint(0, 4))
    )
    line = f"{chance.choice(_METHODS)} {path}?{query} HTTP/1.{chance.choice('01')}"
    text = (
        f"{line}\r\n{chance.choice(_HEADERS)}\r\nConnection: close\r\n\r\n{chance.choice(_BODIES)}"
    )
    data = bytearray(text.encode("latin-1"))
    if chance.random() < 0.15:
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def asked(port: int, data: bytes) -> bytes:
    """The status that comes, if any does."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.3)
        try:
            connection.sendall(data)
            return connection.recv(64)[9:12]
        except OSError:
            return b""  # It waits for the rest, or the answer to another method.


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_is_a_defect(
    world: World, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    world.limits = world.limits.model_copy(update={"http_push": True})
    backend = await world.backend(group_size=2)
    await backend.buffer("math").push(pushed((1, 0), (1, 1), (2, 0)))
    chance = random.Random(seed)
    async with asking(backend) as web:
        paths = (await web.get("/openapi.json")).data["paths"]
        addresses = [
            (path, [each["name"] for each in operation.get("parameters", ())])
            for path, methods in paths.items()
            for operation in methods.values()
        ]
        addresses += [("/", []), ("/ui/", []), ("/ui/nothing.js", []), ("//", [])]
        found = set()
        for _ in range(120):
            data = request(chance, addresses)
            status = await asyncio.to_thread(asked, web.port, data)
            assert status[:1] in (b"", b"2", b"3", b"4"), data
            found.add(status)
        assert {b"200", b"400", b"405"} <= found
        assert (await web.get("/health")).text == "SERVING\n"
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert backend.quotas.calls.held.total <= 1  # A stream of events may not have ended yet.
