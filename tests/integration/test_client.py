"""Both clients against a real server over a fresh store, also across its violent death."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from experience_buffer import (
    EID,
    AdvantageConfig,
    AlreadyExistsError,
    Batch,
    BufferConfig,
    BufferNotFoundError,
    Client,
    ClientOptions,
    ConsumerConfig,
    ConsumerNotFoundError,
    Experience,
    ExperienceNotFoundError,
    GroupNotFoundError,
    InvalidRequestError,
    LeaseNotFoundError,
    PushRefusedError,
    RetryOptions,
    Tombstone,
    WriterOptions,
    WrongStateError,
    trxp,
)
from tests.integration.server import Server, serving

OPTIONS = ClientOptions(retry=RetryOptions(max_backoff_seconds=0.2, reconnect_seconds=60))
MATH = BufferConfig(
    "math",
    group_by="task",
    group_size=3,
    consumers=(ConsumerConfig("trainer", "group"),),
    advantage=AdvantageConfig("rloo"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Server(tmp_path_factory.mktemp("server"))) as running:
        yield running


@pytest.fixture
def buffer(server: Server) -> Iterator[Client]:
    with Client(server.address, options=OPTIONS) as client:
        for info in client.list_buffers():
            client.delete_buffer(info.config.name, force=True)
        client.create_buffer("default")
        yield client


def experience(run: int, *, task: int = 5, reward: float | None = None) -> Experience:
    return Experience(
        eid=EID(3, task, run, 0, "abcdef"),
        tokens=torch.arange(11, dtype=torch.int32),
        logprobs=torch.linspace(-1, 0, 7),
        prompt_length=4,
        reward=float(run) if reward is None else reward,
    )


def test_pushed_comes_back_bit_for_bit(buffer: Client) -> None:
    pushed = [experience(run) for run in range(5)]
    result = buffer.push(pushed, group_size=5)
    assert (result.num_stored, result.policy_version) == (5, None)
    assert buffer.push(pushed, group_size=5).num_duplicates == 5
    batch = buffer.sample(5)
    assert batch.payloads == tuple(trxp.encode([item]) for item in pushed)
    assert batch.uids == tuple(item.eid.uid for item in pushed)
    assert batch.num_deliveries == (1,) * 5
    batch.ack()
    batch.ack()
    empty = buffer.sample(1, timeout=0)
    assert not empty
    assert empty.shortfall


def test_groups_get_advantages_and_tombstones_complete_them(buffer: Client) -> None:
    info = buffer.create_buffer(MATH)
    assert info.config.group_size == 3
    assert info.config.advantage is not None
    assert info.config.advantage.estimator == "rloo"
    buffer.publish_policy_version(17, buffer="math")
    result = buffer.push(
        [experience(0, reward=1.0), experience(1, reward=0.0)],
        buffer="math",
        tombstones=[Tombstone(EID(3, 5, 2, 0, "abcdef"), "timed out")],
    )
    assert result.policy_version == 17
    batch = buffer.sample(1, buffer="math")
    assert (batch.num_units, len(batch), batch.policy_version) == (1, 2, 17)
    assert batch.groups == ("3/5", "3/5")
    advantages = [item.advantages for item in batch.experiences]
    assert [float(a[0]) for a in advantages if a is not None] == [1.0, -1.0]
    batch.nack("try again")
    again = buffer.sample(1, buffer="math")
    assert again.num_deliveries == (2, 2)
    pickle.loads(pickle.dumps(again)).ack()


def test_refused_items_are_named_and_the_others_stored(buffer: Client) -> None:
    buffer.push([experience(1)])
    with pytest.raises(PushRefusedError) as caught:
        buffer.push([experience(0), experience(1, reward=0.5), experience(2)])
    [refused] = caught.value.result.refused
    assert (refused.index, refused.reason) == (1, "conflict")
    assert sorted(item.uid for item in buffer.list()) == sorted(
        experience(run).eid.uid for run in range(3)
    )


def test_errors_have_their_classes(buffer: Client) -> None:
    with pytest.raises(BufferNotFoundError) as caught:
        buffer.push([experience(1)], buffer="nowhere")
    assert caught.value.subject == "nowhere"
    with pytest.raises(ConsumerNotFoundError):
        buffer.sample(1, consumer="nobody")
    with pytest.raises(ExperienceNotFoundError):
        buffer.get("no/such/0/0/uid")
    with pytest.raises(GroupNotFoundError):
        buffer.seal_group("no/group")
    with pytest.raises(LeaseNotFoundError):
        buffer.ack(99_991)
    with pytest.raises(AlreadyExistsError):
        buffer.create_buffer("default")
    with pytest.raises(InvalidRequestError):
        buffer.sample(0)
    buffer.push([experience(1)])
    with pytest.raises(WrongStateError):
        buffer.delete_buffer("default")


@pytest.mark.parametrize("name", ["", "no/slash", "a" * 65])
def test_buffer_names_are_checked(buffer: Client, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        buffer.create_buffer(name)


def test_administration(buffer: Client) -> None:
    assert buffer.create_buffer("default", exist_ok=True).config.name == "default"
    assert buffer.update_buffer("default", lease_seconds=7.5).config.lease_seconds == 7.5
    assert buffer.get_buffer("default").config.lease_seconds == 7.5
    buffer.push([experience(run) for run in range(7)])
    assert [item.state for item in buffer.list(page_size=3)] == ["ready"] * 7
    stored = buffer.get(experience(3).eid.uid)
    assert stored.summary.reward == 3.0
    assert stored.experience is not None
    assert torch.equal(stored.experience.tokens, experience(3).tokens)
    sealed = buffer.seal_group("3/5")
    assert (sealed.num_members, sealed.group_size) == (7, 7)
    deleted = buffer.delete([experience(6).eid.uid, "unknown"])
    assert (deleted.num_deleted, deleted.unknown_uids) == (1, ("unknown",))
    [stats] = buffer.get_stats("default").buffers
    assert stats.num_items == 6
    assert stats.consumers[0].num_ready_units == 6
    assert buffer.publish_policy_version(3) is None
    assert buffer.publish_policy_version(5) == 3
    assert buffer.drop_group("3/5", reason="test") == 6


def test_stream_delivers_what_a_writer_pushes(buffer: Client, connect: Any) -> None:
    buffer.update_buffer("default", group_size=1)
    seen: list[str] = []
    with (
        connect(buffer.address, options=OPTIONS) as client,
        client.writer(options=WriterOptions(max_batch_items=13)) as writer,
        client.stream(10, prefetch=3) as stream,
    ):
        writer.append([experience(0, task=task) for task in range(50)])
        for task in range(50, 100):
            writer.append(experience(0, task=task))
        for batch in stream:
            seen += batch.uids
            batch.ack()
            if len(seen) == 100:
                break
        writer.flush()
        assert writer.counts.num_stored == 100
    assert sorted(seen) == sorted(experience(0, task=task).eid.uid for task in range(100))
    assert not buffer.sample(1, timeout=0)
    assert buffer.get_stats("default").buffers[0].consumers[0].num_leases == 0
    with (
        connect(buffer.address, options=OPTIONS) as client,
        pytest.raises(BufferNotFoundError),
        client.stream(1, buffer="nowhere") as stream,
    ):
        next(stream)


def test_closing_a_stream_gives_its_leases_back(buffer: Client) -> None:
    buffer.push([experience(0)], group_size=1)
    with buffer.stream(1) as stream:
        first = next(stream)
    again = buffer.sample(1)
    assert again.uids == first.uids
    with pytest.raises(LeaseNotFoundError):
        first.ack()
    again.ack()


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


def test_an_async_client_of_many_event_loops_ends_each_quietly(buffer: Client) -> None:
    command = [sys.executable, "-c", LOOPS, buffer.address]
    # As long as it takes: the test has a limit of its own.
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_lost_when_the_server_is_killed(make_server: Callable[..., Server]) -> None:
    server = make_server()
    consumed: list[str] = []

    def consume(batch: Batch) -> None:
        try:
            batch.ack()
        except LeaseNotFoundError:
            return  # Delivered again.
        consumed.extend(batch.uids)

    with Client(server.address, options=OPTIONS) as client:
        # Batches that a killed server had sent and nobody received wait for their lease's end.
        client.update_buffer("default", group_size=1, lease_seconds=3.0)
        with client.stream(5, prefetch=2) as stream, client.writer() as writer:
            for task in range(60):
                writer.append(experience(0, task=task))
                if task in (20, 40):
                    consume(next(stream))
                    server.restart()
            writer.flush(timeout=60)
            counts = writer.counts
            assert counts.num_stored + counts.num_duplicates == 60
            while len(set(consumed)) < 60:
                consume(next(stream))
    assert len(consumed) == 60
