"""Watching the policy version, with both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from experience_buffer import (
    AsyncClient,
    BufferNotFoundError,
    CallCancelledError,
    Client,
    ClientOptions,
    RetryOptions,
    UnavailableError,
)
from experience_buffer.v1 import service_pb2 as pb
from tests.unit.client.rpc.pushed import FAST, acquired


@pytest.fixture
async def aio(server: tuple[Any, str]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server[1], options=FAST) as client:
        yield client


def say(script: Any, *versions: int | None) -> None:
    with script.changed:
        script.versions += versions
        script.changed.notify_all()


def test_versions_come_as_they_are_published(script: Any, buffer: Client) -> None:
    with buffer.watch_policy_version("math") as versions:
        assert script.requests == []
        say(script, None, 0, 7, 3)
        assert [next(versions) for _ in range(4)] == [None, 0, 7, 3]
        assert script.requests == [pb.WatchPolicyVersionRequest(buffer="math")]
    assert script.ended_streams.acquire(timeout=10)
    assert list(versions) == []


def test_a_reconnected_watch_does_not_repeat_itself(script: Any, buffer: Client) -> None:
    script.break_watch_after += [2, 1]
    say(script, 5, 7, 7, 7, 11)
    with buffer.watch_policy_version() as versions:
        assert [next(versions) for _ in range(3)] == [5, 7, 11]
    assert len(script.requests) == 3


def test_closing_a_watch_wakes_its_thread(script: Any, buffer: Client, pool: Any) -> None:
    versions = buffer.watch_policy_version()
    waiting = pool.submit(list, versions)
    assert script.open_streams.acquire(timeout=10)
    versions.close()
    assert waiting.result(10) == []
    assert script.ended_streams.acquire(timeout=10)


def test_closing_ends_a_reconnecting_watch(connect: Any, pool: Any) -> None:
    retry = RetryOptions(initial_backoff_seconds=60, max_backoff_seconds=60)
    with connect("127.0.0.1:1", options=ClientOptions(retry=retry)) as client:
        versions = client.watch_policy_version()
        waiting = pool.submit(list, versions)
        versions.close()
        assert waiting.result(10) == []


def test_a_watch_fails_for_good(script: Any, buffer: Client, connect: Any) -> None:
    script.failures.append(BufferNotFoundError("no buffer 'math'", subject="math"))
    with (
        buffer.watch_policy_version("math") as versions,
        pytest.raises(BufferNotFoundError, match="no buffer"),
    ):
        next(versions)
    retry = RetryOptions(initial_backoff_seconds=0.01, reconnect_seconds=0.1)
    with (
        connect("127.0.0.1:1", options=ClientOptions(retry=retry)) as nobody,
        pytest.raises(UnavailableError, match="watch_policy_version to"),
    ):
        next(nobody.watch_policy_version())


def test_closing_the_client_fails_its_watches(script: Any, buffer: Client) -> None:
    versions = buffer.watch_policy_version()
    say(script, 13)
    assert next(versions) == 13
    buffer.close()
    with pytest.raises(CallCancelledError, match="closed"):
        next(versions)


async def test_a_timeout_around_an_async_watch_loses_nothing(script: Any, aio: AsyncClient) -> None:
    versions = aio.watch_policy_version()
    say(script, 5)
    assert await anext(versions) == 5
    waiting = asyncio.ensure_future(anext(versions))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await acquired(script.ended_streams)
    say(script, 5, 7)
    assert await anext(versions) == 7
    await versions.close()
