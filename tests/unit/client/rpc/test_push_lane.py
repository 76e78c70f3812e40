"""Pushes that soon follow one another share a stream; nobody sees a difference but in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from experience_buffer import (
    EID,
    BufferFullError,
    CallCancelledError,
    Client,
    ClientOptions,
    DeadlineExceededError,
    Experience,
    InvalidRequestError,
    RetryOptions,
)
from experience_buffer._async import push_lane as async_push_lane
from experience_buffer._messages import push_bytes
from experience_buffer._sync import connection, push_lane
from experience_buffer._transport import lane_memory
from experience_buffer.aio import AsyncClient
from experience_buffer.errors import InternalServerError

RETRY = RetryOptions(initial_backoff_seconds=0.01, max_backoff_seconds=0.05)
FAST = ClientOptions(retry=RETRY)
SECONDS = 10.0


def experience(run: int, length: int = 7) -> Experience:
    return Experience(
        eid=EID(3, 5, run), tokens=list(range(length)), logprobs=[0.5] * 5, prompt_length=length - 5
    )


class Pusher:
    """Either client, driven from here in the same way."""

    def __init__(self, kind: str, address: str, options: ClientOptions = FAST) -> None:
        self.lane: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if kind == "aio":
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever)
            self._thread.start()
            self._aio = AsyncClient(address, token="secret", options=options)
        else:
            self._sync = Client(address, token="secret", options=options)

    def push(self, *runs: int, **options: Any) -> Any:
        return self._do("push", [experience(run) for run in runs], **options)

    def push_large(self, run: int) -> Any:
        return self._do("push", [experience(run, lane_memory.MAX_BYTES // 4)])

    def close(self) -> None:
        self._do("close")

    def end(self) -> None:
        self.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        if self._loop is None:
            return getattr(self._sync, verb)(*arguments, **options)
        call = getattr(self._aio, verb)(*arguments, **options)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(SECONDS)


@pytest.fixture
def script(server: tuple[Any, str]) -> Any:
    return server[0]


@pytest.fixture(params=["sync", "aio"])
def pusher(request: pytest.FixtureRequest, server: tuple[Any, str]) -> Any:
    pusher = Pusher(request.param, server[1])
    yield pusher
    pusher.end()


def ways(script: Any) -> list[str]:
    """How each push came."""
    return [type(request).__name__.removesuffix("Request") for request in script.requests]


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_push_is_a_call_and_those_behind_it_share_a_stream(
    script: Any, pusher: Pusher
) -> None:
    results = [pusher.push(run) for run in range(6)]
    assert [result.num_stored for result in results] == [1] * 6
    assert [result.policy_version for result in results] == [17] * 6
    assert ways(script) == ["Push"] + ["PushStream"] * 5
    assert len(script.metadata) == 2
    assert script.metadata[1]["authorization"] == "Bearer secret"
    assert [request.sequence for request in script.requests[1:]] == [1, 2, 3, 4, 5]
    assert all(29 < request.timeout_seconds <= 30 for request in script.requests[1:])


def test_an_unused_stream_ends_and_who_pushes_seldom_makes_calls(
    script: Any, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (push_lane, async_push_lane):
        monkeypatch.setattr(module, "KEEP_SECONDS", 0.2)
    pusher.push(1)
    pusher.push(2)
    until(lambda: script.num_ended_pushes == 1)
    pusher.push(3)
    time.sleep(0.3)
    pusher.push(4)
    assert ways(script) == ["Push", "PushStream", "Push", "Push"]


def test_what_a_broken_stream_leaves_open_is_pushed_by_calls(script: Any, pusher: Pusher) -> None:
    script.break_push_after.append(2)
    assert [pusher.push(run).num_stored for run in range(2)] == [1, 1]
    assert pusher.push(2).num_duplicates == 1
    assert pusher.push(3).num_stored == 1
    assert ways(script) == ["Push", "PushStream", "PushStream", "Push", "Push"]


def test_streams_are_tried_again_later(
    script: Any, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (push_lane, async_push_lane):
        monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    script.break_push_after.append(1)
    for run in range(3):
        pusher.push(run)
    assert ways(script) == ["Push", "PushStream", "Push", "PushStream"]


def test_a_stream_that_the_server_ended_while_nobody_pushed_is_opened_again(
    script: Any, pusher: Pusher
) -> None:
    pusher.push(0)
    pusher.push(1)
    script.end_pushes()
    until(lambda: script.num_ended_pushes == 1)
    time.sleep(0.1)
    assert pusher.push(2).num_stored == 1
    assert ways(script) == ["Push", "PushStream", "PushStream"]


def test_errors_are_those_of_a_call(script: Any, pusher: Pusher) -> None:
    pusher.push(0)
    script.push_errors.append(InvalidRequestError("too odd", subject="group_size"))
    with pytest.raises(InvalidRequestError, match="too odd") as caught:
        pusher.push(1)
    assert caught.value.subject == "group_size"
    script.push_errors.append(BufferFullError("full", retry_delay_seconds=0.01))
    assert pusher.push(1).num_stored == 1
    assert ways(script) == ["Push"] + ["PushStream"] * 3


def test_a_push_without_an_answer_ends_in_time_and_the_next_one_is_a_call(
    script: Any, pusher: Pusher
) -> None:
    pusher.push(0)
    pusher.push(1)
    with script.lock:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"no answer after 0\.\d+ s; give the call"):
            pusher.push(2, timeout=0.3)
        assert 0.25 < time.monotonic() - begun < 5
    until(lambda: script.num_ended_pushes == 1)
    assert pusher.push(3).num_stored == 1
    assert ways(script).count("Push") == 2


def test_who_comes_while_the_stream_is_in_use_makes_a_call(script: Any, pusher: Pusher) -> None:
    pusher.push(0)
    pusher.push(1)
    for _ in range(2):  # The first call, and the stream.
        assert script.begun.acquire(timeout=SECONDS)
    with script.lock:
        first, _ = in_background(lambda: pusher.push(2))
        until(lambda: script.num_waiting_pushes == 1)
        second, _ = in_background(lambda: pusher.push(3))
        assert script.begun.acquire(timeout=SECONDS)
    first.join(SECONDS)
    second.join(SECONDS)
    assert sorted(ways(script)[2:]) == ["Push", "PushStream"]
    assert len(script.stored) == 4


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_a_large_push_is_a_call(script: Any, server: tuple[Any, str], kind: str) -> None:
    pusher = Pusher(kind, server[1], ClientOptions(retry=RETRY, shared_memory=False))
    try:
        pusher.push(0)
        assert pusher.push_large(1).num_stored == 1
        assert pusher.push(2).num_stored == 1
        assert pusher.push_large(3).num_stored == 1
    finally:
        pusher.end()
    assert ways(script) == ["Push", "Push", "PushStream", "Push"]


def test_large_pushes_are_calls_once_a_stream_has_no_memory(script: Any, pusher: Pusher) -> None:
    pusher.push(0)
    assert [pusher.push_large(run).num_stored for run in (1, 2)] == [1, 1]
    assert [pusher.push(3).num_stored, pusher.push_large(4).num_stored] == [1, 1]
    assert ways(script) == ["Push", "PushStream", "Push", "PushStream", "Push"]


def test_the_answer_to_another_push_is_not_taken(
    script: Any, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher.push(0)
    pusher.push(1)
    write = push_bytes.push_stream_request
    monkeypatch.setattr(
        push_bytes, "push_stream_request", lambda _, *rest, **options: write(77, *rest, **options)
    )
    with pytest.raises(InternalServerError, match="push 2 was answered as push 77"):
        pusher.push(2)
    monkeypatch.undo()
    assert pusher.push(3).num_stored == 1
    assert ways(script)[-1] == "Push"


def test_closing_ends_the_push_under_way_and_the_stream(script: Any, pusher: Pusher) -> None:
    pusher.push(0)
    pusher.push(1)
    with script.lock:
        thread, found = in_background(lambda: pusher.push(2))
        until(lambda: script.num_waiting_pushes == 1)
        pusher.close()
        thread.join(SECONDS)
    assert isinstance(found[0], CallCancelledError)
    until(lambda: script.num_ended_pushes == 1)
    until(lambda: "experience-buffer-push" not in [each.name for each in threading.enumerate()])


def test_a_process_that_was_forked_off_has_a_stream_of_its_own(
    script: Any, server: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(connection, "_INHERITED", kept)
    with Client(server[1], options=FAST) as client:
        for run in range(2):
            client.push([experience(run)])
        lane = client._lane
        client._pid = 0
        client.push([experience(2)])
        assert client._lane is not lane
        assert lane in kept
        lane.close()
    assert ways(script) == ["Push", "PushStream", "Push"]
