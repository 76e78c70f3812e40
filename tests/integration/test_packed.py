"""Packed batches hold what the same batch in TRXP holds, over calls and over streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experience_buffer import (
    AdvantageConfig,
    Batch,
    BufferConfig,
    Client,
    Experience,
    PackedBatch,
    Staleness,
)
from experience_buffer.v1 import types_pb2
from tests.integration.buffers import create
from tests.integration.plain import NUM_RESPONSE, experience, sample
from tests.integration.server import Stub
from tests.integration.streams import speaking

PACKED = types_pb2.SAMPLE_FORMAT_PACKED


def varied() -> list[Experience]:
    """Groups of two whose members differ in lengths, fields and texts."""
    made = []
    for task in range(3):
        for run in range(2):
            length = NUM_RESPONSE + task + run
            fields: dict[str, Any] = {
                "tokens": torch.arange(2 + length, dtype=torch.int32) * (task + 1),
                "logprobs": torch.linspace(-3, 0, length),
                "info": {"version_start": task, "nested": {"run": run, "text": "ü" * task}},
                "response_text": f"task {task}, run {run}",
            }
            if run:
                fields["action_mask"] = torch.arange(length) % 3 != 0
            if task == 2:
                fields["teacher_logprobs"] = torch.linspace(-1, 0, length)
            made.append(experience(task, run, **fields))
    return made


def fill(client: Client, name: str, estimator: str) -> None:
    """A buffer that replays all groups, so that the same batch can be had twice."""
    staleness = Staleness(max_lag=1, on_stale="mark")
    advantage = AdvantageConfig(estimator) if estimator else None
    create(client, name, 2, replay=True, staleness=staleness, advantage=advantage)
    client.push(varied(), buffer=name)
    client.publish_policy_version(3, buffer=name)


def assert_same(plain: Batch, packed: PackedBatch) -> None:
    """The packed batch says what the plain one said in the delivery before it."""
    assert packed.uids == list(plain.uids)
    assert packed.groups == list(plain.groups)
    assert packed.flags == list(plain.flags)
    payloads = [packed.payload(index) for index in range(len(packed))]
    assert payloads == list(plain.payloads), "the very bytes"
    for index, one in enumerate(plain.experiences):
        other = packed.of(index)
        assert (other.eid.uid, other.info, other.reward) == (one.eid.uid, one.info, one.reward)
        assert torch.equal(other.tokens, one.tokens)
        assert (other.advantages is None) == (one.advantages is None)
    for column, values in (
        ("num_deliveries", [count + 1 for count in plain.num_deliveries]),
        ("times_sampled", plain.times_sampled),
        ("generation", plain.generations),
        ("probability", plain.probabilities),
        ("staleness", plain.staleness),
    ):
        assert packed.column(column).tolist() == list(values), column


@pytest.mark.parametrize("estimator", ["", "grpo"])
def test_a_packed_batch_says_what_a_plain_one_says(
    client: Client, name: str, estimator: str
) -> None:
    fill(client, name, estimator)
    client.sample(3, buffer=name).ack()
    plain = client.sample(3, buffer=name)
    assert plain.num_units == 3
    assert "stale" in plain.flags[0]
    assert (plain.experiences[0].advantages is not None) == bool(estimator)
    plain.nack()
    packed = client.sample(3, buffer=name, format="packed")
    assert_same(plain, packed.packed)
    assert packed.uids == (), "the tuples are empty"
    assert (len(packed), packed.num_units) == (6, 3)


def test_call_and_stream_pack_alike(client: Client, stub: Stub, name: str) -> None:
    fill(client, name, "grpo")
    called = sample(stub, name, 3, format=PACKED)
    assert not called.experiences
    assert called.num_units == 3
    client.nack(called.lease.id, buffer=name)
    with speaking(stub) as stream:
        stream.open(name, 3, credits=1, format=PACKED)
        received = stream.batch()
        streamed = PackedBatch.parse(b"".join(frame.packed for frame in received.frames))
        assert not received.experiences
    first = PackedBatch.parse(called.packed)
    assert streamed.uids == first.uids
    assert [streamed.payload(i) for i in range(6)] == [first.payload(i) for i in range(6)]
    assert streamed.column("num_deliveries").tolist() == [2] * 6


def test_the_clients_stream_delivers_packed(client: Client, name: str) -> None:
    fill(client, name, "")
    with client.stream(1, buffer=name, format="packed", prefetch=3) as stream:
        batches = [next(stream) for _ in range(3)]
        uids = [uid for batch in batches for uid in batch.packed.uids]
        assert uids == [one.eid.uid for one in varied()]
        for batch in batches:
            padded = batch.packed.padded(pad_token_id=0)
            assert padded["input_ids"].shape[0] == 2
            rows = batch.packed.varlen()
            assert int(rows["cu_seqlens"][-1]) == len(rows["input_ids"])
            batch.ack()


def test_a_rank_gets_its_part_packed(client: Client, name: str) -> None:
    fill(client, name, "")
    parts = [
        client.sample(2, buffer=name, rank=rank, world_size=2, format="packed") for rank in (0, 1)
    ]
    groups = [set(part.packed.groups) for part in parts]
    assert sorted(key for one in groups for key in one) == ["7/0", "7/1"]
    assert [len(part) for part in parts] == [2, 2]


def test_a_large_packed_batch_comes_in_bounded_frames(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name)
    texts = [chr(65 + run) * 900_011 for run in range(5)]
    for run, text in enumerate(texts):
        client.push([experience(0, run, response_text=text)], buffer=name)
    with speaking(stub) as stream:
        stream.open(name, 5, credits=1, format=PACKED)
        received = stream.batch()
    sizes = [len(frame.packed) for frame in received.frames]
    assert max(sizes) <= 1.5 * 1024 * 1024
    assert max(sizes) - min(sizes) <= len(sizes)
    assert len(sizes) >= 4
    assert [frame.last for frame in received.frames] == [False] * (len(sizes) - 1) + [True]
    assert (received.last.num_units, received.frames[0].num_units) == (5, 0)
    packed = PackedBatch.parse(b"".join(frame.packed for frame in received.frames))
    assert [packed.of(index).response_text for index in range(5)] == texts


def test_an_empty_packed_sample_says_why(client: Client, name: str) -> None:
    client.create_buffer(BufferConfig(name))
    batch = client.sample(1, buffer=name, format="packed", timeout=0)
    assert not batch
    assert "nothing is stored" in batch.shortfall
