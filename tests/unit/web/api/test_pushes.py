"""Pushing as JSON: off unless allowed, each item with its outcome, and nothing else than over gRPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer import trxp
from experience_buffer_server.web.api import pushes
from tests.unit.builders import World
from tests.unit.web.api.test_routes import granting
from tests.unit.web.asking import Answer, Asking, asking
from tests.unit.web.json_schema import breaches

PUSH = "/api/v1/buffers/math/push"


def one(run: int, **fields: Any) -> dict[str, Any]:
    eid = {"batch": 1, "task": 7, "run": run, "step": 0, "suffix": "a"}
    given = {"eid": eid, "prompt": [5, 6], "response": [8, 9, 10], "reward": 0.5}
    return given | {"logprobs": [-0.1, -0.2, -0.3]} | fields


async def push(web: Asking, body: object, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await web.ask("POST", PUSH, data, **({"Content_Type": "application/json"} | headers))


@pytest.fixture
def allowed(world: World) -> World:
    world.limits = world.limits.model_copy(update={"http_push": True})
    return world


@pytest.fixture
async def web(allowed: World) -> AsyncIterator[Asking]:
    async with asking(await allowed.backend(group_size=4)) as made:
        yield made


async def test_it_is_off_unless_allowed(world: World) -> None:
    async with asking(await world.backend()) as web:
        assert (await push(web, {"experiences": [one(0)]})).status == 404
        assert (await web.get("/api/v1/status")).data["can_push"] is False
        assert (
            PUSH.replace("math", "{buffer}") not in (await web.get("/openapi.json")).data["paths"]
        )


async def test_what_is_pushed_is_stored_and_told(web: Asking) -> None:
    sent = one(1, info={"model_version": 3}, messages=[{"role": "user", "content": "日本"}])
    dead = {"eid": {"batch": 1, "task": 7, "run": 2}, "reason": "timeout"}
    answer = await push(
        web, {"experiences": [one(0), sent, one(0, reward=0.9)], "tombstones": [dead]}
    )
    assert answer.status == 200
    outcomes = answer.data["outcomes"]
    assert [each["status"] for each in outcomes] == ["stored", "stored", "refused", "stored"]
    assert [each["index"] for each in outcomes] == [0, 1, 2, 3]
    again = await push(web, {"experiences": [sent]}, Content_Type="application/json; charset=utf-8")
    assert again.data["outcomes"][0]["status"] == "duplicate"
    payload = (await web.get("/api/v1/buffers/math/experience/payload?uid=1/7/1/0/a")).body
    (stored,) = trxp.decode(payload)
    assert stored.tokens.tolist() == [5, 6, 8, 9, 10]
    assert stored.messages == sent["messages"]
    assert stored.reward == 0.5
    status = (await web.get("/api/v1/status")).data
    assert status["can_push"] is True
    document = (await web.get("/openapi.json")).data
    described = document["paths"][PUSH.replace("math", "{buffer}")]["post"]
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]
    assert not list(breaches(answer.data, schema, document, "push"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no object"),
        (b'{"experiences": [{"eid": {"task": 1}, "reward": NaN}]}', "JSON has no NaN"),
        ({"experience": []}, "did you mean 'experiences'?"),
        ({"experiences": {}}, "experiences is no list"),
        ({"experiences": [3]}, "experiences[0] is no object"),
        ({"experiences": [one(0), one(1, rewrad=1)]}, "did you mean 'reward'?"),
        ({"experiences": [one(0, reward="high")]}, "experiences[0]"),
        ({"experiences": [one(0, eid="1/2")]}, "experiences[0]: eid is missing"),
        ({"experiences": [one(0, eid={"task": 1, "rum": 2})]}, "experiences[0]"),
        ({"experiences": [one(0, prompt=[[1], "x"])]}, "experiences[0]"),
        ({"tombstones": [{"eid": {"task": 1}, "why": ""}]}, "'why' is no field"),
        ({"group_size": -1}, "group_size -1 is no number"),
        ({"group_size": True}, "group_size True is no number"),
        ({"experiences": [one(run) for run in range(98)]}, "over the limit server.max_push_items"),
    ],
)
async def test_what_can_t_be_is_refused_as_a_whole(web: Asking, body: object, words: str) -> None:
    answer = await push(web, body)
    assert (answer.status, answer.error["reason"]) == (400, "INVALID_REQUEST")
    assert words in answer.error["message"]
    assert (await web.get("/api/v1/buffers/math/stats")).data["num_items"] == 0


async def test_only_so_much_is_read(web: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "_MOST_BYTES", 1000)
    answer = await push(web, {"experiences": [one(0, response_text="x" * 2000)]})
    assert (answer.status, answer.error["subject"]) == (413, "body")
    assert "more than 1000 bytes" in answer.error["message"]


async def test_a_form_of_another_site_can_t_push(web: Asking) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = await push(web, {"experiences": [one(0)]}, Content_Type=kind)
        assert (answer.status, answer.error["subject"]) == (415, "content-type"), kind
    asked = await web.ask("OPTIONS", PUSH, Origin="http://evil.example")
    assert asked.status == 405
    assert not any(name.startswith("access-control") for name in asked.headers)


async def test_it_takes_the_role_push(allowed: World) -> None:
    grants = granting(
        ("worker", "push", "math"), ("looker", "look", "math"), ("other", "push", "x")
    )
    async with asking(await allowed.backend(), grants=grants) as web:
        for token, status in (("worker", 200), ("looker", 403), ("other", 403), ("nobody", 401)):
            bearer = f"Bearer {token}"
            answer = await push(web, {"experiences": [one(0)]}, Authorization=bearer)
            assert answer.status == status, token


async def test_a_full_buffer_says_when_to_come_again(allowed: World) -> None:
    backend = await allowed.backend(max_items=1, on_full="refuse")
    async with asking(backend) as web:
        await push(web, {"experiences": [one(0)]})
        answer = await push(web, {"experiences": [one(1)]})
        assert (answer.status, answer.error["reason"]) == (429, "BUFFER_FULL")
        assert int(answer.headers["retry-after"]) >= 1
        assert backend.quotas.pending_by_client.total == 0
        backend.draining.set()
        answer = await push(web, {"experiences": [one(1)]})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
