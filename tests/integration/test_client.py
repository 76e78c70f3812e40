"""Both clients against a real server: what each verb returns and raises."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from experience_buffer import (
    AdvantageConfig,
    AlreadyExistsError,
    BufferConfig,
    BufferNotFoundError,
    Client,
    ClientOptions,
    ConsumerConfig,
    ConsumerNotFoundError,
    ExperienceNotFoundError,
    GroupNotFoundError,
    InvalidRequestError,
    LeaseNotFoundError,
    RetryOptions,
    Tombstone,
    WriterOptions,
    WrongStateError,
)
from tests.integration.plain import experience, group

OPTIONS = ClientOptions(retry=RetryOptions(max_backoff_seconds=0.2, reconnect_seconds=60))


def test_groups_get_advantages_and_tombstones_complete_them(client: Client, name: str) -> None:
    trainer, rloo = ConsumerConfig("trainer", "group"), AdvantageConfig("rloo")
    info = client.create_buffer(
        BufferConfig(name, group_by="task", group_size=3, consumers=(trainer,), advantage=rloo)
    )
    assert info.config.group_size == 3
    assert info.config.advantage is not None
    assert info.config.advantage.estimator == "rloo"
    client.publish_policy_version(17, buffer=name)
    result = client.push(
        [experience(5, 0, reward=1.0), experience(5, 1, reward=0.0)],
        buffer=name,
        tombstones=[Tombstone(experience(5, 2).eid, "timed out")],
    )
    assert result.policy_version == 17
    batch = client.sample(1, buffer=name)
    assert (batch.num_units, len(batch), batch.policy_version) == (1, 2, 17)
    assert batch.groups == ("7/5", "7/5")
    advantages = [item.advantages for item in batch.experiences]
    assert [float(a[0]) for a in advantages if a is not None] == [1.0, -1.0]
    batch.nack("try again")
    again = client.sample(1, buffer=name)
    assert again.num_deliveries == (2, 2)
    pickle.loads(pickle.dumps(again)).ack()


def test_errors_have_their_classes(client: Client, name: str) -> None:
    with pytest.raises(BufferNotFoundError) as caught:
        client.push([experience(5, 1)], buffer="nowhere")
    assert caught.value.subject == "nowhere"
    client.create_buffer(name)
    client.push([experience(5, 1)], buffer=name)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ConsumerNotFoundError, lambda: client.sample(1, buffer=name, consumer="nobody")),
        (ExperienceNotFoundError, lambda: client.get("no/such/0/0/uid", buffer=name)),
        (GroupNotFoundError, lambda: client.seal_group("no/group", buffer=name)),
        (LeaseNotFoundError, lambda: client.ack(99_991, buffer=name)),
        (AlreadyExistsError, lambda: client.create_buffer(name)),
        (InvalidRequestError, lambda: client.sample(0, buffer=name)),
        (WrongStateError, lambda: client.delete_buffer(name)),
        *(
            (InvalidRequestError, functools.partial(client.create_buffer, bad))
            for bad in ("", "no/slash", "a" * 65)
        ),
    ]
    for expected, call in calls:
        with pytest.raises(expected):
            call()


def test_administration(client: Client, name: str) -> None:
    client.create_buffer(name)
    assert client.create_buffer(name, exist_ok=True).config.name == name
    assert client.update_buffer(name, lease_seconds=7.5).config.lease_seconds == 7.5
    assert client.get_buffer(name).config.lease_seconds == 7.5
    pushed = group(5, 7)
    client.push(pushed, buffer=name)
    assert [item.state for item in client.list(page_size=3, buffer=name)] == ["ready"] * 7
    stored = client.get(pushed[3].eid.uid, buffer=name)
    assert stored.summary.reward == 1.0
    assert stored.experience is not None
    assert torch.equal(stored.experience.tokens, pushed[3].tokens.int())
    sealed = client.seal_group("7/5", buffer=name)
    assert (sealed.num_members, sealed.group_size) == (7, 7)
    deleted = client.delete([pushed[6].eid.uid, "unknown"], buffer=name)
    assert (deleted.num_deleted, deleted.unknown_uids) == (1, ("unknown",))
    [stats] = client.get_stats(name).buffers
    assert stats.num_items == 6
    assert stats.consumers[0].num_ready_units == 6
    assert client.publish_policy_version(3, buffer=name) is None
    assert client.publish_policy_version(5, buffer=name) == 3
    assert client.drop_group("7/5", buffer=name, reason="test") == 6


def test_stream_delivers_what_a_writer_pushes(client: Client, name: str, connect: Any) -> None:
    client.create_buffer(BufferConfig(name, group_size=1))
    pushed = [experience(task, 0) for task in range(100)]
    seen: list[str] = []
    with (
        connect(client.address, options=OPTIONS) as either,
        either.writer(buffer=name, options=WriterOptions(max_batch_items=13)) as writer,
        either.stream(10, buffer=name, prefetch=3) as stream,
    ):
        writer.append(pushed[:50])
        for one in pushed[50:]:
            writer.append(one)
        for batch in stream:
            seen += batch.uids
            batch.ack()
            if len(seen) == 100:
                break
        writer.flush()
        assert writer.counts.num_stored == 100
    assert sorted(seen) == sorted(one.eid.uid for one in pushed)
    assert not client.sample(1, buffer=name, timeout=0)
    assert client.get_stats(name).buffers[0].consumers[0].num_leases == 0
    with (
        connect(client.address, options=OPTIONS) as either,
        pytest.raises(BufferNotFoundError),
        either.stream(1, buffer="nowhere") as stream,
    ):
        next(stream)


LOOPS = """
import asyncio, sys
from experience_buffer import AsyncClient
from tests.integration.plain import experience

client = AsyncClient(sys.argv[1])

async def pushes(number):
    for run in range(3):
        await client.push([experience(number, run)])

for number in range(4):
    asyncio.run(pushes(number))
"""


def test_an_async_client_of_many_event_loops_ends_each_quietly(client: Client) -> None:
    command = [sys.executable, "-c", LOOPS, client.address]
    # As long as it takes: the test has a limit of its own.
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
