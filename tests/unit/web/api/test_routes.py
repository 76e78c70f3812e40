"""The routes of /api/v1: the client's values as JSON, under the rules of the calls that they stand for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer import Experience, trxp
from experience_buffer_server.access.grants import Grants, digest_of
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.settings.access import GrantSettings
from experience_buffer_server.web import calls
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, push, settings, uid
from tests.unit.web.asking import Asking, asking

ONE = uid(1, 0)
BASE = "/api/v1/buffers/math"


@pytest.fixture
async def backend(world: World) -> Backend:
    """Two buffers; in one of them a group of three, with a failed rollout."""
    backend = await world.backend(group_size=4)
    await backend.registry.create("secret", settings())
    buffer = backend.buffer("math")
    await buffer.push(pushed((1, 0), (1, 1), info={"model_version": 2**60}))
    await buffer.push(push(dead=[(1, 2)]))
    return backend


@pytest.fixture
async def web(backend: Backend) -> AsyncIterator[Asking]:
    async with asking(backend) as made:
        yield made


def granting(*entries: tuple[str, str, str]) -> Grants:
    """Grants of (token, role, buffers)."""
    return Grants(
        GrantSettings.model_validate(
            {
                "name": token,
                "token_sha256": digest_of(token).hex(),
                "roles": [role],
                "buffers": [buffers],
            }
        )
        for token, role, buffers in entries
    )


async def test_the_server_says_what_it_is(web: Asking) -> None:
    status = (await web.get("/api/v1/status")).data
    assert status["buffers"] == ["math", "secret"]
    assert (status["is_serving"], status["needs_token"]) == (True, False)
    assert status["caller"] == "127.0.0.1"
    assert status["grpc_address"] == "127.0.0.1:50051"


async def test_statistics_are_those_of_the_client(web: Asking) -> None:
    stats = (await web.get("/api/v1/stats")).data
    assert [buffer["name"] for buffer in stats["buffers"]] == ["math", "secret"]
    math = (await web.get(f"{BASE}/stats")).data
    assert (math["num_items"], math["num_open_groups"]) == (2, 1)
    assert (await web.get(f"{BASE}/consumers")).data["consumers"] == math["consumers"]
    assert isinstance((await web.get(f"{BASE}/advice")).data["advice"], list)
    assert isinstance((await web.get("/api/v1/advice")).data["advice"], list)


async def test_buffers_have_their_settings(web: Asking) -> None:
    one = (await web.get(BASE)).data
    assert one["config"]["group_size"] == 4
    assert (await web.get("/api/v1/buffers")).data["buffers"][0] == one


async def test_experiences_come_page_by_page(web: Asking) -> None:
    first = (await web.get(f"{BASE}/experiences?page_size=2")).data
    assert [each["uid"] for each in first["experiences"]] == [uid(1, 0), uid(1, 1)]
    token = first["next_page_token"]
    second = (await web.get(f"{BASE}/experiences?page_size=2&page_token={token}")).data
    assert [each["state"] for each in second["experiences"]] == ["tombstone"]
    assert second["next_page_token"] == ""
    one = (await web.get(f"{BASE}/experiences?rid=2/1/1")).data["experiences"]
    assert [each["uid"] for each in one] == [uid(1, 1)]
    # JavaScript would round it.
    assert one[0]["min_policy_version"] == str(2**60)


async def test_an_experience_is_shown_with_its_texts(web: Asking, backend: Backend) -> None:
    hostile = "<script>alert(1)</script>\x1b[31m\u202e\ud800" + "x" * 100_000
    talk = [{"role": "assistant", "content": hostile}]
    await backend.buffer("math").push(pushed((5, 0), messages=talk, response_text="said"))
    answer = await web.get(f"{BASE}/experience?uid={uid(5, 0)}")
    assert answer.headers["content-type"] == "application/json"
    shown = answer.data
    assert shown["stored"]["summary"]["uid"] == uid(5, 0)
    content = shown["content"]
    assert content["response_text"] == "said"
    assert (content["num_tokens"], content["num_prompt_tokens"]) == (10, 3)
    assert content["messages"][0]["content"].startswith("<script>")
    assert len(content["messages"][0]["content"]) == 20_000
    assert content["cuts"] == [
        {"path": "messages.0.content", "num_chars": len(hostile), "num_entries": None}
    ]
    whole = (await web.get(f"{BASE}/experience?chars=2000000&uid={uid(5, 0)}")).data
    assert whole["content"]["cuts"] == []


async def test_a_failed_rollout_has_no_content_and_no_payload(web: Asking) -> None:
    shown = (await web.get(f"{BASE}/experience?uid={uid(1, 2)}")).data
    assert (shown["content"], shown["stored"]["summary"]["message"]) == (None, "gone")
    for what in ("payload", "tokens", "overview", "image"):
        answer = await web.get(f"{BASE}/experience/{what}?uid={uid(1, 2)}")
        assert (answer.status, answer.error["reason"]) == (409, "WRONG_STATE"), what


async def test_tokens_come_in_windows(web: Asking) -> None:
    shown = (await web.get(f"{BASE}/experience/tokens?start=2&count=3&uid={ONE}")).data
    assert (shown["ids"], shown["num_tokens"]) == ([5, 6, 7], 7)
    assert shown["columns"]["logprobs"] == [-0.5] * 3
    strip = (await web.get(f"{BASE}/experience/overview?points=2&uid={ONE}")).data
    assert strip["starts"] == [0, 3]
    wrong = await web.get(f"{BASE}/experience/tokens?count=5000&uid={ONE}")
    assert (wrong.status, wrong.error["subject"]) == (400, "count")


async def test_a_payload_is_a_file_to_keep(web: Asking) -> None:
    answer = await web.get(f"{BASE}/experience/payload?uid={ONE}")
    assert answer.headers["content-disposition"] == 'attachment; filename="2-1-0-0-a1.trxp"'
    assert answer.headers["content-type"] == "application/octet-stream"
    (one,) = trxp.decode(answer.body)
    assert isinstance(one, Experience)
    assert one.eid.uid == ONE


async def test_an_image_has_the_type_that_it_is_of(web: Asking, backend: Backend) -> None:
    from tests.unit.web.inside.test_images import PNG

    await backend.buffer("math").push(pushed((6, 0), info={"shot": PNG, "page": b"<html>"}))
    answer = await web.get(f"{BASE}/experience/image?uid={uid(6, 0)}")
    assert (answer.headers["content-type"], answer.body) == ("image/png", PNG)
    assert "sandbox" in answer.headers["content-security-policy"]
    none = await web.get(f"{BASE}/experience/image?index=1&uid={uid(6, 0)}")
    assert (none.status, none.error["subject"]) == (404, "index")


@pytest.mark.parametrize(
    ("path", "status", "reason", "words"),
    [
        ("/api/v1/buffers/nope", 404, "BUFFER_NOT_FOUND", "no buffer 'nope'"),
        (f"{BASE}/experience?uid=a/b/0/0/c", 404, "EXPERIENCE_NOT_FOUND", "holds no"),
        (f"{BASE}/experience", 400, "INVALID_REQUEST", "uid is missing"),
        (f"{BASE}/experience?uid=a&uid=b", 400, "INVALID_REQUEST", "uid is given 2 times"),
        (f"{BASE}/experiences?sate=ready", 400, "INVALID_REQUEST", "did you mean state?"),
        (f"{BASE}/experiences?state=redy", 400, "INVALID_REQUEST", "'ready'"),
        (f"{BASE}/experiences?page_size=0", 400, "INVALID_REQUEST", "page_size"),
        (f"{BASE}/experiences?page_token=x", 400, "INVALID_REQUEST", "page_token 'x'"),
        (f"{BASE}/experiences?min_reward=high", 400, "INVALID_REQUEST", "got 'high'"),
        ("/api/v1/nothing", 404, "NOT_FOUND", "Nothing is at /api/v1/nothing"),
        ("/api/v2/stats", 404, "NOT_FOUND", "Nothing is at"),
    ],
)
async def test_what_can_t_be_is_said_in_words(
    web: Asking, path: str, status: int, reason: str, words: str
) -> None:
    answer = await web.get(path)
    assert (answer.status, answer.error["reason"]) == (status, reason)
    assert words in answer.error["message"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_nothing_can_be_changed(web: Asking, method: str) -> None:
    for path in (BASE, f"{BASE}/experience?uid={ONE}", "/api/v1/stats", "/ui/", "/"):
        answer = await web.ask(method, path, b"{}", Content_Type="application/json")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD"), path


async def test_a_token_sees_its_buffers_and_nothing_of_others(backend: Backend) -> None:
    grants = granting(
        ("looker", "look", "math*"), ("worker", "push", "math"), ("m", "metrics", "*")
    )
    async with asking(backend, grants=grants) as web:

        async def seen(path: str, token: str) -> Any:
            return await web.get(path, Authorization=f"Bearer {token}")

        assert (await seen("/api/v1/status", "looker")).data["buffers"] == ["math"]
        assert (await seen("/api/v1/status", "looker")).data["caller"] == "looker"
        assert len((await seen("/api/v1/buffers", "looker")).data["buffers"]) == 1
        assert (await seen(f"{BASE}/experience?uid={ONE}", "looker")).status == 200
        for name in ("secret", "absent"):
            answer = await seen(f"/api/v1/buffers/{name}/stats", "looker")
            assert (answer.status, answer.error["reason"]) == (403, "FORBIDDEN")
            assert f"for buffer '{name}'" in answer.error["message"]
        worker = await seen(f"{BASE}/experiences", "worker")
        assert worker.status == 403
        assert "takes the role look or operate or sample, it has push" in worker.error["message"]
        assert (await seen(f"{BASE}/stats", "worker")).status == 200
        nobody = await web.get(f"{BASE}/experiences?nonsense=1")
        assert (nobody.status, nobody.headers["www-authenticate"]) == (401, "Bearer")
        assert "carries no token" in nobody.error["message"]
        assert (await seen("/metrics", "looker")).status == 403
        assert (await seen("/metrics", "m")).status == 200
        # What is the same everywhere, and holds nothing, is everybody's.
        for path in ("/", "/ui/", "/openapi.json", "/health"):
            assert (await web.get(path)).status == 200
        assert "0.1.0" not in (await web.get("/")).text
        assert ("List", "role") in web.refused
        assert ("metrics", "role") in web.refused


async def test_an_answer_s_bytes_are_counted_until_it_has_left(
    web: Asking, backend: Backend
) -> None:
    await web.get(f"{BASE}/experience?uid={ONE}")
    assert backend.responses.held.total == 0
    assert backend.quotas.calls.held.total == 0


async def test_head_is_get_without_a_body(web: Asking) -> None:
    head = await web.ask("HEAD", f"{BASE}/stats")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) == len((await web.get(f"{BASE}/stats")).body)


async def test_data_is_kept_by_nobody(web: Asking) -> None:
    for path in (f"{BASE}/stats", f"{BASE}/experience/payload?uid={ONE}", "/api/v1/nothing"):
        assert (await web.get(path)).headers["cache-control"] == "no-store"


async def test_it_is_json_whatever_it_holds(web: Asking, backend: Backend) -> None:
    numbers = {"nan": float("nan"), "inf": float("-inf"), "big": 2**70, "small": -3}
    await backend.buffer("math").push(pushed((8, 0), info=numbers))
    answer = await web.get(f"{BASE}/experience?uid={uid(8, 0)}")

    def never(text: str) -> Any:
        raise AssertionError(text)

    info = json.loads(answer.body, parse_constant=never)["content"]["info"]
    assert info == {"nan": "NaN", "inf": "-Infinity", "big": str(2**70), "small": -3}


async def test_large_answers_are_written_in_a_thread(
    web: Asking, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    written = vars(calls)["json_answer"]

    def writing(data: Any) -> Any:
        threads.append(threading.current_thread().name)
        return written(data)

    monkeypatch.setattr(calls, "json_answer", writing)
    await web.get("/api/v1/status")
    await backend.buffer("math").push(pushed(*((task, 0) for task in range(100, 190))))
    await web.get(f"{BASE}/experiences")
    here, aside = threads
    assert here == threading.current_thread().name
    assert aside.startswith("looking")


async def test_what_an_error_repeats_is_short(web: Asking) -> None:
    for path in (f"{BASE}/experience?uid={'x' * 20_000}", f"/api/v1/buffers/{'y' * 20_000}"):
        answer = await web.get(path)
        assert answer.status == 404
        assert len(answer.body) < 2000, path


@pytest.mark.parametrize(
    "path",
    [
        *("/api/v1/buffers/..%2f..%2fetc%2fpasswd", "//api/v1/stats", "/api/v1/buffers/%00/stats"),
        *("/api/v1/buffers/a%20b/stats", "/api/v1/buffers//stats", "/%ff%fe", "/api/v1/stats/"),
        *("http://evil.example/api/v1/stats", "/api/v1/buffers/%F0%9F%99%82/experiences"),
    ],
)
async def test_odd_addresses_are_nowhere(web: Asking, path: str) -> None:
    answer = await web.get(path)
    assert answer.status == (403 if "evil" in path else 404), answer.text
    assert "Traceback" not in answer.text


async def test_a_head_of_events_ends(web: Asking) -> None:
    head = await web.ask("HEAD", "/api/v1/events")
    assert (head.status, head.body) == (200, b"")


async def test_requests_are_counted_by_the_form_of_their_address(web: Asking) -> None:
    for path in (BASE, "/api/v1/buffers/absent", "/ui/some/view", "/nothing/at/all", "/health"):
        await web.get(path)
    text = (await web.get("/metrics")).text
    found = {
        (route, code): float(value)
        for code, route, value in re.findall(
            r'^experience_buffer_http_requests_total\{code="(\d+)",route="([^"]*)"\} (.+)$',
            text,
            re.MULTILINE,
        )
    }
    assert found[("/api/v1/buffers/{buffer}", "200")] == 1
    assert found[("/api/v1/buffers/{buffer}", "404")] == 1
    assert found[("none", "404")] == 1
    assert found[("/ui/", "404")] == 1
    assert not any("absent" in route or "some" in route for route, _ in found)
    assert 'http_seconds_count{route="/health"} 1.0' in text
