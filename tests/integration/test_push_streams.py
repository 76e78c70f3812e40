"""Pushes that share a stream behind the scenes: what ends the stream is no error of theirs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from experience_buffer import AsyncClient, BufferConfig, Client, ClientOptions, RetryOptions
from tests.integration.plain import experience
from tests.integration.server import Server

ONCE = ClientOptions(retry=RetryOptions(max_attempts=1))
NUM_PUSHES = 5

LOOPS = """
import asyncio, sys
from experience_buffer import AsyncClient
from tests.integration.plain import experience

client = AsyncClient(sys.argv[1])

async def pushes(number):
    for run in range(3):
        await client.push([experience(number, run)])

for number in range(8):
    asyncio.run(pushes(number))
"""


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Iterator[Server]:
    """A server whose only stream is taken."""
    server = make_server(toml="[server]\nmax_streams_per_client = 1")
    with Client(server.address) as client:
        client.create_buffer(BufferConfig("b"))
        with client.stream(1, buffer="b"):
            yield server


def test_pushes_need_no_stream(server: Server) -> None:
    with Client(server.address, options=ONCE) as client:
        for run in range(NUM_PUSHES):
            assert client.push([experience(1, run)], buffer="b").num_stored == 1


async def test_async_pushes_need_no_stream(server: Server) -> None:
    async with AsyncClient(server.address, options=ONCE) as client:
        for run in range(NUM_PUSHES):
            result = await client.push([experience(1, run)], buffer="b")
            assert result.num_stored == 1
            await asyncio.sleep(0)


def test_a_client_of_many_event_loops_ends_each_quietly(shared_server: Server) -> None:
    command = [sys.executable, "-c", LOOPS, shared_server.address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
