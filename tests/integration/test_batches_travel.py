"""Batches that go to another process: what they hold, and what they can still do there."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import pytest

from experience_buffer import AsyncClient, Client, LeaseNotFoundError
from tests.integration.buffers import create, trainer
from tests.integration.plain import experience, uid
from tests.integration.server import eventually

TRAINER = """
import pickle, sys
batch = pickle.load(sys.stdin.buffer)
print(sorted(each.eid.uid for each in batch))
assert batch.extend(300.0) > 200.0
assert batch.ack(3) == 0
"""


def trained_elsewhere(batch: Any) -> str:
    """What another process finds in a batch, which it extends and acknowledges."""
    found = subprocess.run(
        [sys.executable, "-c", TRAINER],
        input=pickle.dumps(batch),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return found.stdout.decode().strip()


@pytest.mark.parametrize("format", ["trxp", "packed"])
def test_a_streams_batch_is_acknowledged_in_another_process(
    client: Client, name: str, format: Any
) -> None:
    create(client, name)
    members = [experience(0, run) for run in range(4)]
    client.push(members, buffer=name)
    with client.stream(2, buffer=name, prefetch=1, format=format) as stream:
        assert trained_elsewhere(next(stream)) == str([uid(0, run) for run in range(2)])
        again = pickle.loads(pickle.dumps(next(stream)))
        assert trainer(client, name).num_leased_units == 2
    # The stream's end gives the second one back.
    eventually(lambda: trainer(client, name).num_leased_units == 0, "the second batch is back")
    with pytest.raises(LeaseNotFoundError):
        again.ack(4)
    assert client.state_dict(3, buffer=name)["step"] == 3
    assert client.rewind(2, buffer=name).num_experiences == 2


def test_batches_of_the_async_client_travel(client: Client, name: str) -> None:
    create(client, name)
    client.push([experience(0, run) for run in range(5)], buffer=name)

    async def train() -> None:
        async with AsyncClient(client.address) as buffer:
            sampled = pickle.loads(pickle.dumps(await buffer.sample(1, buffer=name)))
            assert await sampled.ack(0) == 0
            assert [each.eid.run for each in sampled] == [0]
            await sampled.client.close()
            async with buffer.stream(1, buffer=name) as stream:
                streamed = pickle.loads(pickle.dumps(await anext(stream)))
                assert await streamed.begin_ack(1).result() == 0
                nacked = pickle.loads(pickle.dumps(await anext(stream)))
                await nacked.nack("in another process")
                await streamed.client.close()
                await nacked.client.close()

    asyncio.run(train())
    kept = [each.uid for each in client.list(buffer=name) if each.state == "retained"]
    assert kept == [uid(0, run) for run in range(2)]
