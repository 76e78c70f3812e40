"""What can be asked of a running server: groups, leases, and what is stored by what it is."""

from __future__ import annotations

import os
import socket
import time

import pytest

from experience_buffer import (
    AsyncClient,
    Client,
    ClientOptions,
    ConsumerConfig,
    GroupNotFoundError,
    InvalidRequestError,
    LeaseNotFoundError,
)
from tests.integration.buffers import create, states
from tests.integration.plain import group, uid
from tests.integration.server import Server, eventually


def test_who_holds_what_is_told_by_name_address_and_age(
    client: Client, name: str, shared_server: Server
) -> None:
    create(client, name, 2, others=(ConsumerConfig("critic"),))
    client.push(group(1, 2), buffer=name)
    client.push(group(2, 2), buffer=name)
    with Client(shared_server.address, options=ClientOptions(holder="rank 0 of run 7")) as other:
        batch = other.sample(1, buffer=name)
        with client.stream(3, buffer=name, consumer="critic", prefetch=1) as batches:
            mine = next(batches)
            held, streamed = client.list_leases(buffer=name)
            assert (held.id, held.holder, held.consumer) == (
                batch.lease_id,
                "rank 0 of run 7",
                "trainer",
            )
            assert [(unit.key, unit.num_deliveries) for unit in held.units] == [
                (batch.groups[0], 1)
            ]
            assert held.age_seconds is not None
            assert held.address.startswith("127.0.0.1:")
            assert (streamed.id, streamed.on_stream, held.on_stream) == (mine.lease_id, True, False)
            assert streamed.holder == f"{socket.gethostname()}:{os.getpid()}"
            assert [unit.key for unit in streamed.units] == list(mine.uids)
            assert f"held by {streamed.holder}" in repr(streamed)
            assert set(states(client, name)) == {"leased", "ready"}
            assert [one.uid for one in client.list(buffer=name, state="leased")] == sorted(
                {*batch.uids, *mine.uids}
            )
            (alone,) = client.list_leases(buffer=name, lease_id=batch.lease_id)
            assert alone.num_units == 1
            mine.ack()
        batch.ack(3)
    eventually(lambda: not list(client.list_leases(buffer=name)), "leases to end")
    with pytest.raises(LeaseNotFoundError):
        list(client.list_leases(buffer=name, lease_id=batch.lease_id))


def test_groups_say_what_they_wait_for_and_what_was_computed(client: Client, name: str) -> None:
    create(client, name, 3, advantage="grpo")
    client.push(group(1, 3), buffer=name)
    client.push(group(2, 2), buffer=name)
    eventually(lambda: len(list(client.list_groups(buffer=name, state="ready"))) == 1, "a group")
    stuck, ready = client.list_groups(buffer=name)
    assert (stuck.state, stuck.num_members, stuck.group_size, stuck.missing_runs) == (
        "open",
        2,
        3,
        (2,),
    )
    assert "run 2 is missing" in stuck.waits_for
    assert "has 2 of 3" in str(stuck)
    assert (ready.state, ready.waits_for, len(ready.members)) == ("ready", "", 3)
    assert [one.group for one in client.list_groups(buffer=name, state=["open", "held"])] == [
        stuck.group
    ]
    assert [one.group for one in client.list_groups(buffer=name, order="newest", page_size=1)] == [
        stuck.group,
        ready.group,
    ]
    assert list(client.list_groups(buffer=name, prefix="nowhere")) == []
    details = client.get_group(ready.group, buffer=name)
    (batch,) = [client.sample(1, buffer=name)]
    by_uid = dict(zip(batch.uids, batch.experiences, strict=True))
    for member in details.members:
        computed = by_uid[member.uid].advantages
        assert computed is not None
        assert member.advantage == pytest.approx(float(computed.mean()))
    assert details.computation is not None
    assert (details.computation["estimator"], details.computation["votes"]) == ("grpo", 3)
    assert details.to_dict()["members"][0]["uid"] == uid(1, 0)
    with pytest.raises(GroupNotFoundError):
        client.get_group("9/9", buffer=name)
    with pytest.raises(InvalidRequestError, match="order"):
        client.list_groups(buffer=name, order="random")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="state"):
        client.list_groups(buffer=name, state="lost")  # type: ignore[arg-type]


async def test_the_async_client_asks_the_same(
    client: Client, name: str, shared_server: Server
) -> None:
    create(client, name, 2)
    client.push(group(1, 2), buffer=name)
    async with AsyncClient(shared_server.address) as asking:
        batch = await asking.sample(1, buffer=name)
        (info,) = [one async for one in asking.list_groups(buffer=name)]
        assert (info.state, info.places[0].lease_id) == ("leased", batch.lease_id)
        (lease,) = [one async for one in asking.list_leases(buffer=name)]
        assert lease.id == batch.lease_id
        assert (await asking.get_group(info.group, buffer=name)).group == info.group


def test_statistics_say_how_full_the_disk_is_and_where_the_server_is(
    client: Client, name: str, shared_server: Server
) -> None:
    create(client, name, 2)
    client.push(group(1, 1), buffer=name)
    stats = client.get_stats(name)
    assert stats.disk is not None
    assert stats.disk.place
    assert stats.disk.limit_bytes > stats.disk.live_bytes
    assert stats.disk.free_bytes
    assert stats.address == shared_server.address
    assert stats.start_time == pytest.approx(time.time() - stats.uptime_seconds, abs=5.0)
    assert "free on the disk" in str(stats)
    (trainer,) = stats.buffers[0].consumers
    assert (trainer.num_waiting, trainer.wait_reason) == (0, trainer.wait_reason)
    assert "0 ready of 1 groups; 1 group incomplete" in trainer.waiting_for
    assert f"{name}: trainer would wait: 0 ready" in str(stats)


def test_list_finds_by_content_in_either_order(client: Client, name: str) -> None:
    create(client, name)
    client.push(group(7, 6), buffer=name)
    client.publish_policy_version(4, buffer=name)
    rewards = {one.uid: one.reward for one in client.list(buffer=name)}
    (low, *_, high) = sorted(reward for reward in rewards.values() if reward is not None)
    found = list(client.list(buffer=name, reward=(None, low)))
    assert [one.uid for one in found] == [u for u, r in rewards.items() if r == low]
    newest = [one.uid for one in client.list(buffer=name, newest_first=True, page_size=1)]
    assert newest == list(rewards)[::-1]
    batch = client.sample(2, buffer=name, timeout=0)
    held = client.list(buffer=name, state="leased", consumer="trainer", text="/7/")
    assert [one.uid for one in held] == list(batch.uids)
    batch.ack(9)
    assert [one.uid for one in client.list(buffer=name, step=9)] == list(batch.uids)
    assert client.delete(buffer=name, reward=(high, None)).num_deleted == 1
    assert not list(client.list(buffer=name, truncated=True))
    for wrong in ({"rewards": (0, 1)}, {"reward": 0.5}, {"reward": ("a", None)}, {"flags": "odd"}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            list(client.list(buffer=name, **wrong))
