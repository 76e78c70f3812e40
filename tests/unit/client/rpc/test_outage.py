"""That no server answers is on stderr soon, whoever waits; and an event loop that ends says nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from experience_buffer import (
    ClientOptions,
    DeadlineExceededError,
    RetryOptions,
    UnavailableError,
)
from experience_buffer._transport import outage
from tests.unit.client.rpc.pushed import experience, payload, until

NOBODY = "127.0.0.1:1"


def flush(client: Any) -> None:
    writer = client.writer(buffer="math")
    writer.append(experience(1))
    writer.close()


WAITS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "push": ("push", lambda client: client.push([experience(1)])),
    "sample": ("sample", lambda client: client.sample(1, timeout=2.0)),
    "ask": ("get_stats", lambda client: client.get_stats()),
    "writer": ("writer to buffer 'math'", flush),
    "stream": (
        "sample stream of buffer 'math'",
        lambda client: next(client.stream(1, buffer="math", first_timeout=2.0)),
    ),
    "versions": ("watch of the policy version", lambda client: next(client.watch_policy_version())),
}


@pytest.mark.parametrize("what", WAITS)
def test_it_is_said_within_two_seconds(connect: Any, caplog: Any, what: str) -> None:
    who, wait = WAITS[what]
    experience(0).serialize()
    seconds = 20.0 if what == "writer" else 2.0
    options = ClientOptions(retry=RetryOptions(reconnect_seconds=seconds))
    start = time.time()
    with (
        connect(NOBODY, timeout=2.0, options=options) as client,
        pytest.raises((UnavailableError, DeadlineExceededError)) as caught,
    ):
        wait(client)
    said = [each for each in caplog.records if "no server answers" in each.message]
    assert said[0].created - start < 2.0
    assert f"no server answers at {NOBODY}" in said[0].message
    assert f"{who} waits for one until" in said[0].message
    assert len(said) == 1
    if what == "writer":
        assert "refused" in caught.value.__notes__[0]


def test_it_is_said_when_the_server_is_back(
    script: Any, connected: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "FIRST_SECONDS", 0.0)
    waiting: list[Callable[[Any], Any]] = [
        lambda client: client.get_stats(),
        flush,
        lambda client: next(client.stream(1)),
    ]
    for wait in waiting:
        script.failures += [UnavailableError("starting")] * 2
        script.deliver([payload(1)])
        with connected(
            options=ClientOptions(retry=RetryOptions(initial_backoff_seconds=0.01))
        ) as c:
            wait(c)
            until(lambda: any("answers again" in each.message for each in caplog.records))
        said = [each.message for each in caplog.records]
        assert [f"{'no server' in one}{'again' in one}" for one in said] == [
            "TrueFalse",
            "FalseTrue",
        ]
        caplog.clear()


def test_it_is_on_stderr_where_nobody_has_set_up_logging() -> None:
    script = f"""
from experience_buffer import Client
Client("{NOBODY}", timeout=1.5).get_stats()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith(f"no server answers at {NOBODY}")


LOOPS = """
import asyncio, gc, sys
from experience_buffer import AsyncClient, EID, Experience

client = AsyncClient(sys.argv[1])
rollout = Experience(eid=EID(0, 0, 0), tokens=[1, 2], prompt_length=1)

async def left_open(turn):
    await client.get_stats()
    if turn % 3 == 1:
        stream = client.stream(1)
        asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
    if turn % 3 == 2:
        writer = client.writer()
        await writer.append(rollout)
        asyncio.create_task(client.sample(1))
        await asyncio.sleep(0.001)

def closed_by_hand(coroutine):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(coroutine)
    loop.close()

run = asyncio.run if sys.argv[2] == "run" else closed_by_hand
for turn in range(15):
    run(left_open(turn))
gc.collect()
"""


@pytest.mark.parametrize("how", ["run", "closed by hand"])
def test_a_client_of_many_event_loops_is_silent(server: tuple[Any, str], how: str) -> None:
    command = [sys.executable, "-X", "dev", "-c", LOOPS, server[1], how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Event loop is closed" not in done.stderr
