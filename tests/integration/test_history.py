"""What a server tells of the past, to both clients: trends, training steps, departures."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from experience_buffer import (
    Archive,
    AsyncClient,
    BufferConfig,
    Client,
    ConsumerConfig,
    ConsumerNotFoundError,
    InvalidRequestError,
)
from tests.integration.buffers import create
from tests.integration.plain import groups
from tests.integration.server import MakeServer, Server, eventually


def trained(client: Client, name: str, *steps: int) -> None:
    """A buffer of groups of two, of which each step takes one; one more is dropped."""
    create(client, name, 2)
    client.push(groups(len(steps) + 1, 2), buffer=name)
    client.publish_policy_version(3, buffer=name)
    for step in steps:
        client.sample(1, buffer=name).ack(step=step)
    client.drop_group(f"7/{len(steps)}", buffer=name, reason="its tool\x1b[31m broke")
    client.declare_safe(max(steps), buffer=name)


def test_steps_departures_and_trends(client: Client, name: str) -> None:
    begin = time.time()
    trained(client, name, 4, 5)
    newest, before = client.list_steps(buffer=name)
    assert (newest.consumer, newest.step, before.step) == ("trainer", 5, 4)
    assert (newest.num_experiences, newest.num_groups, newest.groups) == (2, 1, ("7/1",))
    assert newest.first_ack_time is not None
    assert begin - 5 < newest.first_ack_time < time.time() + 5
    assert client.list_steps("trainer", buffer=name, step=4) == (before,)
    assert client.list_steps(buffer=name, step=9) == ()
    assert len(client.list_steps(buffer=name, limit=1)) == 1

    found = client.list_departures(buffer=name)
    assert [one.reason for one in found.departures] == ["consumed"] * 4 + ["group_dropped"] * 2
    assert found.departures[0].acked_by[0].step == 5
    assert found.departures[-1].message == "its tool\x1b[31m broke"
    assert [(count.reason, count.total) for count in found.counts] == [
        ("consumed", 4),
        ("group_dropped", 2),
    ]
    assert [
        one.uid for one in client.list_departures("consumed", buffer=name, limit=2).departures
    ] == [one.uid for one in found.departures[:2]]
    assert len(client.list_departures(buffer=name, unused_only=True).departures) == 2
    assert "\x1b" not in str(found), "what a rollout says moves no cursor"

    # Its first point comes within 5 s of its creation, by the server's clock.
    eventually(lambda: client.get_trends(name).points, "a point", seconds=30)
    trends = client.get_trends(name)
    assert sum(point.num_pushed for point in trends.points) == 6
    assert sum(point.num_trained for point in trends.points) == 4
    assert sum(point.num_unused for point in trends.points) == 2
    assert sum(trends.rewards.counts) == 6
    assert client.get_trends(name, seconds=0.001).points == ()
    for value in (trends, found, newest):
        assert json.loads(json.dumps(value.to_dict()))


def test_what_cannot_be_asked(client: Client, name: str) -> None:
    create(client, name, 2)
    with pytest.raises(ConsumerNotFoundError):
        client.list_steps("nobody", buffer=name)
    with pytest.raises(InvalidRequestError, match="1001 is over 1000"):
        client.list_steps(buffer=name, limit=1001)
    with pytest.raises(InvalidRequestError, match="1001 is over 1000"):
        client.list_departures(buffer=name, limit=1001)
    with pytest.raises(InvalidRequestError, match="at least 0"):
        client.get_trends(name, seconds=-1)
    assert client.list_departures(buffer=name).departures == ()
    assert client.list_steps(buffer=name) == ()


def test_the_async_client_tells_the_same(client: Client, shared_server: Server, name: str) -> None:
    trained(client, name, 1)

    async def looked() -> Any:
        async with AsyncClient(shared_server.address) as one:
            return (
                await one.list_steps(buffer=name),
                (await one.list_departures(buffer=name)).departures,
                (await one.get_trends(name)).buffer,
            )

    steps, departures, buffer = asyncio.run(looked())
    assert steps == client.list_steps(buffer=name)
    assert departures == client.list_departures(buffer=name).departures
    assert buffer == name


def test_after_a_restart_steps_are_known_as_far_as_they_are_kept(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math", 2)
        client.push(groups(3, 2), buffer="math")
        for step in (0, 1, 2):
            client.sample(1, buffer="math").ack(step=step)
        client.declare_safe(0, buffer="math")
        server.kill()
        server.start()
        steps = client.list_steps(buffer="math")
        assert [(one.step, one.num_experiences, one.is_partial) for one in steps] == [
            (2, 2, True),
            (1, 2, True),
        ]
        assert all(one.first_ack_time is None for one in steps)
        client.declare_safe(2, buffer="math")
        departures = client.list_departures(buffer="math").departures
        assert [one.acked_by[0].step for one in departures] == [2, 2, 1, 1]


def test_an_experience_tells_its_history(client: Client, name: str) -> None:
    create(client, name, 2)
    first, second = groups(1, 2)
    client.push([first], buffer=name)
    client.push([second], buffer=name)
    batch = client.sample(1, buffer=name)
    stored = client.get(first.eid.uid, buffer=name)
    assert [event.kind for event in stored.history] == ["pushed", "completed", "leased"]
    pushed, _, leased = stored.history
    assert pushed.who.startswith("127.0.0.1:")
    assert leased.who, "the client names itself"
    assert leased.lease_id == batch.lease_id
    assert leased.until_time is not None
    batch.ack(step=2)
    last = client.get(first.eid.uid, buffer=name).history[-1]
    assert (last.kind, last.consumer, last.step) == ("acknowledged", "trainer", 2)
    assert json.loads(json.dumps(stored.to_dict()))["history"][0]["kind"] == "pushed"


def test_what_was_archived_tells_its_history_too(client: Client, name: str) -> None:
    archive = Archive(segment_seconds=0.1)
    consumers = [ConsumerConfig("trainer", unit="group")]
    config = BufferConfig(
        name, consumers=consumers, group_size=2, advantage="grpo", archive=archive
    )
    client.create_buffer(config)
    pushed = groups(1, 2)
    client.push(pushed, buffer=name)
    client.sample(1, buffer=name).ack(step=6)
    client.declare_safe(6, buffer=name)
    uid = pushed[0].eid.uid
    client.annotate({uid: {"info": {"judge": 0.5}}}, buffer=name)
    found = client.get(uid, buffer=name)
    assert [(event.kind, event.step, event.message) for event in found.history] == [
        ("pushed", None, ""),
        ("computed", None, "grpo"),
        ("acknowledged", 6, ""),
        ("departed", None, "consumed"),
        ("annotated", None, "judge"),
    ]
    times = [event.time or 0.0 for event in found.history]
    assert times == sorted(times)
    assert min(times) > 0
    departures = client.list_departures(buffer=name).departures
    assert [one.is_archived for one in departures] == [True, True]
