"""Under which names the server may be asked, and which headers its answers have."""

from __future__ import annotations

import pytest

from experience_buffer_server.access.grants import parse
from experience_buffer_server.web.front import dressed, is_ours
from tests.unit.builders import World
from tests.unit.web.asking import asking


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:9464", "[::1]:9464", "[::1]", "10.0.0.7", "localhost:1", "LOCALHOST."),
        *("server:9464", "a.localhost", "box.local:80", "buffer.ns.svc.cluster.local"),
        *("buffer.example", "Buffer.Example:9464"),
    ],
)
def test_nobody_else_can_have_these_names(host: str) -> None:
    assert is_ours(host, {"buffer.example"})


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:9464", ":9464"),
        *("buffer.example.evil.example", "server:port", "127.0.0.1@evil.example"),
    ],
)
def test_these_may_lead_here_for_somebody_else(host: str) -> None:
    assert not is_ours(host, {"buffer.example"})


async def test_another_site_s_name_gets_nothing_but_what_machines_ask_for(world: World) -> None:
    backend = await world.backend()
    async with asking(backend) as web:
        for path in ("/", "/ui/", "/api/v1/buffers", "/openapi.json", "/nothing"):
            answer = await web.get(path, Host="evil.example")
            assert (answer.status, answer.error["subject"]) == (403, "host"), path
        for path in ("/health", "/metrics"):
            assert (await web.get(path, Host="evil.example")).status == 200
    # Where a token is asked for, no other site's script has one.
    async with asking(backend, grants=parse("")) as web:
        assert (await web.get("/ui/", Host="evil.example")).status == 200
        assert (await web.get("/metrics", Host="evil.example")).status == 401


def test_an_answer_s_own_policy_wins() -> None:
    own = (b"content-security-policy", b"default-src 'self'")
    found = dressed([own, (b"cache-control", b"no-cache")])
    assert [value for name, value in found if name == own[0]] == [own[1]]
    assert [value for name, value in found if name == b"cache-control"] == [b"no-cache"]
