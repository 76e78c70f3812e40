"""What Trinity-RFT's buffers drop, skip or hang on; see `test_peers.py`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from experience_buffer import (
    BufferConfig,
    BufferFullError,
    Client,
    ConsumerConfig,
    Pacing,
    Selector,
    WriterOptions,
)
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.integration.plain import experience, group, stats
from tests.integration.server import Server, eventually


def alone(name: str, **config: Any) -> BufferConfig:
    """A buffer of single experiences."""
    return BufferConfig(name, **({"group_by": "none"} | config))


def test_trinity_a_timeout_with_too_few_loses_none_of_them(client: Client, name: str) -> None:
    """There 5 were asked for and 3 had come: the caller got 0, and the 3 were gone."""
    client.create_buffer(alone(name))
    client.push(group(0, 3), buffer=name)
    nothing = client.sample(5, buffer=name, timeout=0.1)
    assert not nothing
    assert "0 of 5 items after waiting 0.1 s: 3 ready of 5 items" in nothing.shortfall
    some = client.sample(5, buffer=name, min_batch_size=2, timeout=0.1)
    assert some.uids == tuple(one.eid.uid for one in group(0, 3))
    some.nack()
    client.push([experience(0, 3), experience(0, 4)], buffer=name)
    assert client.sample(5, buffer=name).uids == tuple(one.eid.uid for one in group(0, 5))


def test_trinity_closing_keeps_the_last_partial_batch(make_server: Callable[..., Server]) -> None:
    """There closing drops it, on the side that writes and on the side that reads."""
    server = make_server()
    with Client(server.address) as client:
        client.create_buffer(alone("b"))
        options = WriterOptions(linger_seconds=60, max_batch_items=100)
        with client.writer(buffer="b", options=options) as writer:
            for one in group(0, 3):
                writer.append(one)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(client.sample, 5, buffer="b", timeout=40)
            eventually(
                lambda: client.get_stats("b").buffers[0].consumers[0].num_waiting, "it to wait"
            )
            assert server.stop() == 0
            assert reading.result().shortfall == "the server is stopping"
        server.start()
        client.push([experience(0, 3), experience(0, 4)], buffer="b")
        batch = client.sample(5, buffer="b")
        assert batch.uids == tuple(one.eid.uid for one in group(0, 5))


def test_trinity_a_full_priority_queue_says_so(client: Client, name: str) -> None:
    """There a full one drops what comes, and nobody hears of it."""
    trainer = ConsumerConfig("trainer", selector=Selector("prioritized", seed=1))
    client.create_buffer(alone(name, max_items=3, consumers=(trainer,)))
    client.push(group(0, 3), buffer=name)
    with pytest.raises(BufferFullError, match=r"is full: 3 \+ 1 exceed max_items = 3"):
        client.push([experience(0, 3)], buffer=name, timeout=0.1)
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(client.push, [experience(0, 3)], buffer=name, timeout=40)
        batch = client.sample(3, buffer=name)
        assert set(batch.uids) == {one.eid.uid for one in group(0, 3)}
        batch.ack()
        assert pushing.result().num_stored == 1, "it came through once there was room"


def test_trinity_an_experience_over_32_mib_is_not_skipped(client: Client, name: str) -> None:
    """There SQL mode skips it with a line in the log."""
    client.create_buffer(alone(name))
    size = 9 * 1024 * 1024
    one = experience(
        0,
        0,
        tokens=torch.arange(size, dtype=torch.int32),
        prompt_length=size - 2,
        logprobs=[-1, -2],
    )
    assert client.push([one], buffer=name).num_stored == 1
    batch = client.sample(1, buffer=name)
    assert len(batch.payloads[0]) > 32 * 1024 * 1024
    assert torch.equal(batch.experiences[0].tokens, one.tokens)


def test_trinity_whoever_waits_is_told_for_what(
    client: Client, stub: ExperienceBufferStub, name: str
) -> None:
    """ "get_batch hangs, no log, how can we debug": statistics say so while it waits."""
    client.create_buffer(
        BufferConfig(
            name,
            group_size=4,
            consumers=(ConsumerConfig("trainer", "group"),),
            pacing=Pacing(consumer="trainer", max_staleness=0, batch_size=1),
        )
    )
    client.push(group(0, 3), buffer=name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.sample, 2, buffer=name, timeout=1.0)
        told = eventually(lambda: stats(stub, name).consumers[0].waiting_for, "it to wait")
        assert "0 ready of 2 groups" in told
        assert "oldest open group '7/0' has 3 of 4" in told
        assert "at most 1 can be used in time" in stats(stub, name).consumers[0].pushes_wait_for
        assert "oldest open group '7/0' has 3 of 4" in waiting.result().shortfall
