"""The metrics endpoint by itself: its time limit, its bound on connections, and what it answers."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from experience_buffer_server.access.audit import Audit
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.rpc import metrics_endpoint
from experience_buffer_server.rpc.metrics_endpoint import MetricsServer
from experience_buffer_server.settings.server import ConfigurationError


def serve(
    registry: CollectorRegistry, port: int = 0, is_serving: Callable[[], bool] = lambda: True
) -> MetricsServer:
    guard = Guard(None, Audit(time.monotonic), shows_certificates=False, count=print)
    return MetricsServer("127.0.0.1", port, registry, guard, is_serving, None)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("apples", "Eaten.", registry=registry).inc(7)
    made = serve(registry)
    yield made
    made.close()


def read(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[str, str]:
    """The body and the content type."""
    url = f"http://127.0.0.1:{server.port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_both_formats_of_prometheus_are_spoken(server: MetricsServer) -> None:
    body, kind = read(server)
    assert "apples_total 7.0" in body
    assert kind.startswith("text/plain")
    body, kind = read(server, Accept="application/openmetrics-text; version=1.0.0")
    assert body.endswith("# EOF\n")
    assert kind.startswith("application/openmetrics-text")
    assert read(server, "/metrics?name[]=pears_total")[0] == ""


def stuck() -> bool:
    raise TimeoutError


@pytest.mark.parametrize(
    ("is_serving", "status", "words"),
    [
        (lambda: True, 200, "SERVING\n"),
        (lambda: False, 503, "NOT_SERVING\n"),
        (stuck, 503, "NOT_SERVING: the server is too busy to answer\n"),
    ],
)
def test_health_is_told_to_everybody(
    is_serving: Callable[[], bool], status: int, words: str
) -> None:
    made = serve(CollectorRegistry(), is_serving=is_serving)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)
        connection.request("GET", "/health?from=somebody")
        answer = connection.getresponse()
        assert (answer.status, answer.read().decode()) == (status, words)
        connection.close()
    finally:
        made.close()


@pytest.mark.parametrize("version", ["abc", "1.x", "1..0", "9" * 5000])
def test_a_version_that_is_none_is_the_scraper_s_fault(
    server: MetricsServer, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        read(server, Accept=f"application/openmetrics-text; version={version}")
    with refused.value as answer:
        assert b"numbers with dots" in answer.read()
    assert not caplog.records
    for sound in ("7", "1.0.0", "0.0.1"):
        assert "apples" in read(server, Accept=f"application/openmetrics-text; version={sound}")[0]


def test_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "_LOOK_SECONDS", 600.0)
    serve(CollectorRegistry()).close()


def test_a_connection_ends_when_its_time_is_over(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it says something now and then, which would renew a mere timeout."""
    monkeypatch.setattr(metrics_endpoint, "_MAX_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(20)
        slow.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        assert slow.recv(100) == b""


def test_the_oldest_connection_makes_room(server: MetricsServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for connection in silent:
            connection.settimeout(20)
        assert "apples" in read(server)[0]
        assert threading.active_count() - before <= 2 * metrics_endpoint._MAX_CONNECTIONS
        assert silent[0].recv(100) == b""
        assert "apples" in read(server)[0]
    finally:
        for connection in silent:
            connection.close()


class Broken(Collector):
    def collect(self) -> Iterator[Metric]:
        raise TimeoutError("the loop is busy")


def test_a_scrape_that_fails_is_logged_and_ends_no_server(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Broken())
    broken = serve(registry)
    try:
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                read(broken)
            refused.value.close()
        assert "the loop is busy" in caplog.text
    finally:
        broken.close()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f":{port}: Address .*another port"):
            serve(CollectorRegistry(), port)
