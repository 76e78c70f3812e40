"""Sample streams with steps, ranks, packed batches, byte credits and a timeout for the first."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import Client, DeadlineExceededError, InvalidRequestError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2
from tests.unit.client.rpc.pushed import FAST, experience, of_kind, payload


def test_a_stream_acks_with_the_step(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1)])
    with buffer.stream(1) as stream:
        batch = next(stream)
        assert batch.ack(step=59) == 0
        with pytest.raises(InvalidRequestError, match="step"):
            batch.ack(step="60")  # type: ignore[arg-type]
    assert script.acks == [(1, 59, None)]
    assert of_kind(script, pb.AckRequest) == []


def test_a_stream_of_a_rank_goes_on_after_what_was_taken(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    script.break_sample_after.append(2)
    with buffer.stream(4, prefetch=1, rank=1, world_size=2) as stream:
        first = next(stream)
        assert (first.rank, first.world_size) == (1, 2)
        # The second batch comes by the credit of the first, and is lost with the connection.
        assert script.reconnected()
        script.deliver([payload(3)])
        third = next(stream)
        assert third.lease_id == 3
        assert third.ack(61) == 0
    opened = of_kind(script, pb.SampleStreamOpen)
    assert opened[0].rank_of == types_pb2.RankOf(rank=1, world_size=2)
    assert opened[1].rank_of.after_lease_id == 1
    assert script.nacked == []
    assert script.acks == [(3, 61, None)]


def test_a_stream_of_packed_batches_joins_their_frames(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1), payload(2)], [payload(3)]]
    with buffer.stream(2, format="packed") as stream:
        first, second = next(stream), next(stream)
    assert first.packed.uids == [experience(1).eid.uid, experience(2).eid.uid]
    assert [item.reward for item in second.experiences] == [3.0]
    assert first.num_bytes == len(payload(1)) + len(payload(2))


def test_a_stream_returns_bytes_as_batches_are_taken(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1), payload(2)], [payload(3)]]
    sizes = [len(payload(1)) + len(payload(2)), len(payload(3))]
    with buffer.stream(2, prefetch=1, max_bytes=70_001) as stream:
        next(stream)
        next(stream).ack()
    assert script.byte_credits == [70_001, *sizes]
    assert script.credits == [1, 1, 1]


def test_a_rank_without_units_gets_an_empty_part_to_ack(script: Any, buffer: Client) -> None:
    script.batches += [[], [payload(1)]]
    place: dict[str, Any] = {"rank": 2, "world_size": 3, "max_bytes": 73}
    with buffer.stream(2, prefetch=1, format="packed", **place) as stream:
        empty = next(stream)
        assert (bool(empty), len(empty), empty.num_bytes) == (False, 0, 0)
        assert empty.ack(79) == 0
        second = next(stream)
        assert len(second) == 1
        second.ack(83)
    assert script.acks == [(empty.lease_id, 79, None), (second.lease_id, 83, None)]
    assert script.byte_credits == [73, len(payload(1))]


def test_bytes_are_granted_before_the_batches_they_bound(script: Any, buffer: Client) -> None:
    with buffer.stream(1, max_bytes=67) as stream:
        messages = stream._plan.opening(after_lease_id=0)
    kinds = [message.WhichOneof("message") for message in messages]
    assert kinds == ["open", "byte_credits", "credits"]
    with buffer.stream(1) as stream:
        messages = stream._plan.opening(after_lease_id=0)
    assert [message.WhichOneof("message") for message in messages] == ["open", "credits"]
    with pytest.raises(InvalidRequestError, match="max_bytes is -1"):
        buffer.stream(1, max_bytes=-1)


def test_an_overdue_first_batch_is_explained(script: Any, buffer: Client) -> None:
    script.waiting_for = "0 ready of 64"
    with buffer.stream(64, buffer="math", first_timeout=0.05) as stream:
        for _ in range(2):
            with pytest.raises(DeadlineExceededError, match=r"0\.05 s: 0 ready of 64") as caught:
                next(stream)
            assert caught.value.subject == "math"
        script.deliver([payload(1)])
        batch = None
        while batch is None:
            try:
                batch = next(stream)
            except DeadlineExceededError:
                continue
        assert batch.uids == (experience(1).eid.uid,)


def test_an_overdue_first_batch_repeats_the_servers_note(script: Any, buffer: Client) -> None:
    script.notes.append("31 ready of 64; 7 groups incomplete")
    with (
        buffer.stream(64, first_timeout=0.5) as stream,
        pytest.raises(DeadlineExceededError, match="7 groups incomplete; go on waiting"),
    ):
        next(stream)
    assert of_kind(script, pb.GetStatsRequest) == []


def test_only_the_first_batch_has_a_timeout(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)]]
    limits: list[float | None] = []
    with buffer.stream(1, first_timeout=71.0) as stream:
        wait_for = stream._changed.wait_for

        def recording(condition: Any, limit: float | None = None) -> Any:
            limits.append(limit)
            return wait_for(condition, limit)

        stream._changed.wait_for = recording  # type: ignore
        next(stream)
        next(stream)
    assert limits == [71.0, None]


def test_no_server_explains_an_overdue_first_batch(connect: Any) -> None:
    with (
        connect("127.0.0.1:1", options=FAST) as client,
        client.stream(1, first_timeout=0.1) as stream,
        pytest.raises(DeadlineExceededError, match=r"get_stats to 127\.0\.0\.1:1 failed"),
    ):
        next(stream)
