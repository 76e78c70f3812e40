"""The HTTP server by itself: its bounds, what it says to everybody, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from experience_buffer_server.rpc import health
from experience_buffer_server.settings.server import ConfigurationError
from experience_buffer_server.web import door
from experience_buffer_server.web.door import listen
from experience_buffer_server.web.served import Served
from tests.unit.builders import World, until
from tests.unit.web.asking import SECONDS, Asking, asking

_STRICT = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def apples(served: Served) -> Served:
    registry = CollectorRegistry()
    Counter("apples", "Eaten.", registry=registry).inc(7)
    return dataclasses.replace(served, metrics=make_wsgi_app(registry))


@pytest.fixture
async def web(world: World) -> AsyncIterator[Asking]:
    async with asking(await world.backend(), prepare=apples) as made:
        yield made


async def test_both_formats_of_prometheus_are_spoken(web: Asking) -> None:
    answer = await web.get("/metrics")
    assert "apples_total 7.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    answer = await web.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert (await web.get("/metrics?name[]=pears_total")).text == ""
    assert "apples" in (await web.get("/metrics?name[]=pears_total&name[]=apples_total")).text
    assert (await web.get("/metrics", Accept_Encoding="gzip")).body[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("version", ["abc", "1.x", "1..0", "9" * 5000])
async def test_a_version_that_is_none_is_the_scraper_s_fault(
    web: Asking, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    answer = await web.get("/metrics", Accept=f"application/openmetrics-text; version={version}")
    assert (answer.status, answer.error["reason"]) == (400, "INVALID_REQUEST")
    assert "numbers with dots" in answer.error["message"]
    assert not caplog.records
    for sound in ("7", "1.0.0", "0.0.1"):
        accepted = f"application/openmetrics-text; version={sound}"
        assert "apples" in (await web.get("/metrics", Accept=accepted)).text


async def test_health_is_told_to_everybody(web: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await web.get("/health?from=somebody", Host="evil.example")
    assert (answer.status, answer.text) == (200, "SERVING\n")
    web.served.backend.draining.set()
    answer = await web.get("/health")
    assert (answer.status, answer.text) == (503, "NOT_SERVING\n")
    monkeypatch.setattr(health, "_PULSE_SECONDS", -1.0)  # No turn is as short.
    answer = await web.get("/health")
    assert answer.status == 503
    assert answer.text == "NOT_SERVING: the server is too busy to answer\n"


async def test_every_answer_is_strict(web: Asking) -> None:
    for path in ("/", "/health", "/metrics", "/ui/", "/ui", "/nothing"):
        headers = (await web.get(path)).headers
        assert {name: headers[name] for name in _STRICT} == _STRICT, path
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["server"] == "experience-buffer"
        assert not any(name.startswith("access-control") for name in headers)


async def test_where_nothing_is_people_get_a_page_and_programs_json(web: Asking) -> None:
    answer = await web.get("/nothing<script>")
    assert (answer.status, answer.error["status"]) == (404, "NOT_FOUND")
    page = await web.get("/nothing<script>", Accept="text/html,*/*")
    assert page.status == 404
    assert "<h1>Nothing is here" in page.text
    assert "<script" not in page.text
    wrong = await web.ask("POST", "/metrics")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
    assert wrong.error["message"] == "POST isn't possible here; what is: GET, HEAD."
    head = await web.ask("HEAD", "/metrics")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 20


async def test_what_would_be_ignored_is_refused(web: Asking) -> None:
    answer = await web.get("/metrics?nme[]=apples_total")
    assert answer.status == 400
    assert answer.error["message"] == "unknown parameter 'nme[]'; did you mean name[]?"


async def test_a_connection_ends_when_its_time_is_over(
    web: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it says something now and then, which would renew a mere timeout."""
    monkeypatch.setattr(door, "_MAX_SECONDS", 0.2)

    def trickle() -> bytes:
        with socket.create_connection(("127.0.0.1", web.port)) as slow:
            slow.settimeout(SECONDS)
            slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            try:
                return slow.recv(100)
            except ConnectionResetError:
                return b""

    assert await asyncio.to_thread(trickle) == b""


async def test_the_oldest_silent_connection_makes_room(web: Asking) -> None:
    before = threading.active_count()
    silent = await asyncio.to_thread(
        lambda: [socket.create_connection(("127.0.0.1", web.port)) for _ in range(200)]
    )
    try:
        assert "apples" in (await web.get("/metrics")).text
        assert web.server._door.num_visits <= door._MAX_CONNECTIONS
        assert threading.active_count() - before <= 4
        silent[0].settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(silent[0].recv, 100) == b""
        assert "apples" in (await web.get("/metrics")).text
    finally:
        for connection in silent:
            connection.close()
    await until(lambda: web.server._door.num_visits == 0)


async def test_what_is_no_http_is_answered_in_a_line_and_not_logged(
    web: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    def speak(words: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", web.port)) as plain:
            plain.settimeout(SECONDS)
            plain.sendall(words)
            said = b""
            while more := plain.recv(1000):
                said += more
            return said

    upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    for words in (
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A" * 70_000,
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):
        assert (await asyncio.to_thread(speak, words)).startswith(b"HTTP/1.1 400 ")
    said = await asyncio.to_thread(speak, b"GET /health HTTP/1.1\r\nHost: a\r\n" + upgrade)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


class Broken(Collector):
    def collect(self) -> list[Metric]:
        raise TimeoutError("the loop is busy")


async def test_a_scrape_that_fails_is_logged_and_ends_no_server(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Broken())

    def broken(served: Served) -> Served:
        return dataclasses.replace(served, metrics=make_wsgi_app(registry))

    async with asking(await world.backend(), prepare=broken) as web:
        for _ in range(2):
            answer = await web.get("/metrics")
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert "the loop is busy" in caplog.text


async def test_a_defect_has_an_id_and_no_words_of_its_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(*_: object) -> list[bytes]:
        raise KeyError("a secret")

    async with asking(
        await world.backend(), prepare=lambda served: dataclasses.replace(served, metrics=defect)
    ) as web:
        answer = await web.get("/metrics")
    assert (answer.status, answer.error["reason"]) == (500, "INTERNAL_SERVER_ERROR")
    assert "secret" not in answer.text
    assert "secret" in caplog.text
    assert answer.error["message"].split()[2].rstrip(";") in caplog.text


async def test_it_ends_at_once_with_open_connections(world: World) -> None:
    hold = threading.Event()

    def slow(*_: object) -> list[bytes]:
        hold.wait(SECONDS)
        return []

    async with asking(
        await world.backend(), prepare=lambda served: dataclasses.replace(served, metrics=slow)
    ) as web:
        silent = socket.create_connection(("127.0.0.1", web.port))
        under_way = asyncio.create_task(web.get("/metrics"))
        await until(lambda: web.server._door.num_visits == 2)
        begun = time.monotonic()
        await web.server.close()
        assert time.monotonic() - begun < 1.0
        with pytest.raises(OSError, match=r"reset|closed|remote"):
            await under_way
        hold.set()
        silent.close()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f":{port}: Address .*another port"):
            listen("127.0.0.1", port)
