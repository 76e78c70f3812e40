"""Server-sent events: paced, bounded, for those who may see them, and over when they should be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer_server.web.api import events
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, settings, settle, until
from tests.unit.web.api.test_routes import granting
from tests.unit.web.asking import SECONDS, Asking, asking
from tests.unit.web.json_schema import breaches


class Tab:
    """A connection that has asked for events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.head = ""

    async def event(self) -> tuple[str, Any]:
        """The next event: its name, and what it holds."""
        async with asyncio.timeout(SECONDS):
            while True:
                line = (await self._reader.readline()).decode()
                assert line, "the stream has ended"
                if line.startswith("event: "):
                    name = line.removeprefix("event: ").strip()
                    data = (await self._reader.readline()).decode()
                    return name, json.loads(data.removeprefix("data: "))

    async def ended(self) -> bytes:
        """Whatever comes until its end."""
        async with asyncio.timeout(SECONDS):
            with contextlib.suppress(ConnectionResetError):
                return await self._reader.read()
        return b""

    async def close(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def opened(web: Asking, token: str = "") -> Tab:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port, limit=1 << 24)
    tab = Tab(reader, writer)
    given = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n{given}\r\n".encode())
    tab.head = (await reader.readuntil(b"\r\n\r\n")).decode()
    return tab


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_SECONDS", 0.01)
    monkeypatch.setattr(events, "_SHARE", 0)


@pytest.fixture
async def web(world: World, fast: None) -> AsyncIterator[Asking]:
    async with asking(await world.backend()) as made:
        yield made


async def test_events_tell_what_changes(web: Asking) -> None:
    tab = await opened(web)
    assert "content-type: text/event-stream; charset=utf-8" in tab.head
    assert "cache-control: no-store" in tab.head
    name, first = await tab.event()
    assert name == "overview"
    document = (await web.get("/openapi.json")).data
    schema = {"$ref": "#/components/schemas/ServerEvent"}
    assert not list(breaches(first, schema, document, "event"))
    assert first["buffers"][0]["num_items"] == 0
    await web.served.backend.buffer("math").push(pushed((1, 0)))
    while (await tab.event())[1]["buffers"][0]["num_items"] != 1:
        pass
    await tab.close()
    await until(lambda: web.server._door.num_visits == 0)


async def test_the_newest_point_of_the_trends_comes_along(web: Asking) -> None:
    await settle(web.served.backend.buffer("math"), after=6.0)  # An interval is over.
    tab = await opened(web)
    _, event = await tab.event()
    await tab.close()
    trends = (await web.get("/api/v1/buffers/math/trends")).data
    assert event["points"]["math"] in trends["points"]


async def test_a_stream_outlives_what_a_request_may_take(
    web: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experience_buffer_server.web import door

    monkeypatch.setattr(door, "_MAX_SECONDS", 0.05)
    tab = await opened(web)
    for _ in range(20):
        await tab.event()
    await tab.close()


async def test_only_so_many_tabs_are_served(web: Asking) -> None:
    tabs = [await opened(web) for _ in range(events._MAX_TABS_OF_ONE)]
    for tab in tabs:
        await tab.event()
    answer = await web.get("/api/v1/events")
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert "close some tabs" in answer.error["message"]
    # Nor do they keep others out.
    assert (await web.get("/health")).status == 200
    await tabs.pop().close()
    while (again := await opened(web)).head.startswith("HTTP/1.1 429"):
        await again.close()
    await again.event()
    for tab in (*tabs, again):
        await tab.close()


async def test_a_tab_that_does_not_read_is_shut_out(
    world: World, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_SLOWEST_SECONDS", 0.05)
    monkeypatch.setattr(events, "_BYTES_PER_SECOND", 10**12)
    backend = await world.backend()
    for number in range(50):
        await backend.registry.create(f"buffer-{number}", settings())
    async with asking(backend) as web:
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", web.port))
            silent.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: web.server._door.num_visits == 1)
            await until(lambda: web.server._door.num_visits == 0)


async def test_large_events_come_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_SECONDS", 0.0)
    monkeypatch.setattr(events, "_BYTES_PER_SECOND", 1000)
    async with asking(await world.backend()) as web:
        tab = await opened(web)
        await tab.event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await tab.event()
        await tab.close()


async def test_the_end_of_the_server_ends_them(web: Asking) -> None:
    tab = await opened(web)
    await tab.event()
    web.served.backend.draining.set()
    name = "overview"
    while name == "overview":
        name, _ = await tab.event()
    assert name == "end"
    assert (await web.get("/health")).status == 503
    await tab.close()


async def test_a_tab_sees_what_its_token_may_and_ends_with_it(world: World, fast: None) -> None:
    backend = await world.backend()
    await backend.registry.create("secret", settings())
    async with asking(backend, grants=granting(("looker", "look", "math"))) as web:
        refused = await opened(web)
        assert refused.head.startswith("HTTP/1.1 401")
        await refused.close()
        tab = await opened(web, "looker")
        _, event = await tab.event()
        assert [buffer["name"] for buffer in event["buffers"]] == ["math"]
        web.served.guard.replace(granting(("another", "look", "math")))
        assert b"event: end" not in await tab.ended()
        await until(lambda: backend.quotas.calls.held.total == 0)
        await tab.close()
