"""Leases, steps, ranks, packed batches, priorities and pacing, as the client asks for them."""

from __future__ import annotations

import json
import pickle
import time
from typing import Any

import pytest
import torch

from experience_buffer import (
    BufferConfig,
    Client,
    InvalidRequestError,
    Pacing,
    TrxpError,
    UnavailableError,
    WrongStateError,
)
from experience_buffer._messages import delivery_calls
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2
from tests.unit.client.rpc.pushed import experience, of_kind, payload


def test_a_batch_says_how_it_was_chosen(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1), payload(2)])
    batch = buffer.sample(2)
    assert batch.probabilities == (0.25, 0.25)
    assert batch.times_sampled == (11, 11)
    assert batch.generations == (14, 15)
    assert (batch.rank, batch.world_size) == (None, 0)
    assert batch.num_bytes == len(payload(1)) + len(payload(2))
    assert not of_kind(script, pb.SampleRequest)[0].HasField("rank_of")
    with pytest.raises(ValueError, match="format='packed'"):
        batch.packed  # noqa: B018


def test_acks_carry_their_step(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [payload(2)], [payload(3)]]
    assert buffer.sample(1).ack() == 0
    assert buffer.sample(1).ack(step=0) == 0
    assert buffer.ack(7, step=19) == 3
    assert buffer.sample(1).ack(23) == 0
    assert script.acks == [(1, None, None), (2, 0, None), (7, 19, None), (3, 23, None)]


def test_a_lease_gets_more_time(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1)])
    batch = buffer.sample(1, buffer="math")
    before = batch.expire_time
    assert batch.extend(5000.0) == 5000.0
    assert batch.expire_time == pytest.approx(time.monotonic() + 5000.0, abs=5)
    assert batch.expire_time > before
    script.failures.append(UnavailableError("connection lost"))
    assert batch.extend() == 7001.0
    assert batch.expire_time == pytest.approx(time.monotonic() + 7001.0, abs=5)
    asked = of_kind(script, pb.ExtendLeaseRequest)
    assert [(each.buffer, each.lease_id, each.lease_seconds) for each in asked] == [
        ("math", 1, 5000.0),
        ("math", 1, 0.0),
        ("math", 1, 0.0),
    ]
    batch.nack("too long")
    [given_back] = of_kind(script, pb.NackRequest)
    assert (given_back.lease_id, given_back.reason) == (1, "too long")


def test_an_empty_batch_says_why_and_has_nothing_to_end_or_extend(
    script: Any, buffer: Client
) -> None:
    batch = buffer.sample(64, timeout=0)
    assert (bool(batch), batch.shortfall) == (False, "0 ready of 64")
    assert batch.extend() == float("inf")
    assert batch.ack(3) == batch.ack() == 0
    batch.nack()
    assert len(script.requests) == 1


def test_a_rank_asks_for_one_shared_batch_after_the_other(script: Any, buffer: Client) -> None:
    script.batches += [[payload(1)], [], [payload(3)], [payload(4)], [payload(5)]]
    script.num_waiting_ranks = 2
    place = {"rank": 1, "world_size": 3}
    batch = buffer.sample(6, **place)  # type: ignore[arg-type]
    assert (batch.rank, batch.world_size) == (1, 3)
    assert batch.ack(step=29) == 2
    empty = buffer.sample(6, **place)  # type: ignore[arg-type]
    assert (bool(empty), empty.lease_id) == (False, 2)
    assert empty.ack(step=31) == 2
    buffer.sample(6, **place)  # type: ignore[arg-type]
    buffer.sample(6, rank=0, world_size=3)
    buffer.sample(6)
    buffer.sample(6, **place, timeout=0)  # type: ignore[arg-type]
    asked = [request.rank_of for request in of_kind(script, pb.SampleRequest)]
    assert [(each.rank, each.world_size, each.after_lease_id) for each in asked] == [
        (1, 3, 0),
        (1, 3, 1),
        (1, 3, 2),
        (0, 3, 0),
        (0, 0, 0),
        (1, 3, 3),
    ]
    assert script.acks == [(1, 29, 1), (2, 31, 1)]


def test_cursors_are_those_of_one_client_and_consumer(script: Any, buffer: Client) -> None:
    script.batches += [[payload(run)] for run in range(7)]

    def after(client: Client, **where: Any) -> int:
        client.sample(1, rank=2, world_size=3, **where)
        return int(of_kind(script, pb.SampleRequest)[-1].rank_of.after_lease_id)

    assert after(buffer) == 0
    assert after(buffer, buffer="math") == 0
    assert after(buffer, consumer="critic") == 0
    assert after(buffer) == 1
    with pickle.loads(pickle.dumps(buffer)) as resumed:
        assert after(resumed) == 0
    buffer.rewind(37)
    assert after(buffer) == 0
    assert after(buffer, buffer="math") == 2


@pytest.mark.parametrize("place", [{"rank": 0}, {"world_size": 2}])
def test_a_rank_needs_its_world(script: Any, buffer: Client, place: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="give both"):
        buffer.sample(1, **place)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="give both"):
        buffer.stream(1, **place)  # type: ignore[arg-type]
    assert script.requests == []


def test_a_packed_batch_is_read_when_asked_for(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1), payload(2)])
    batch = buffer.sample(2, format="packed")
    assert batch
    assert batch.uids == ()
    assert "packed" in repr(batch)
    batch = pickle.loads(pickle.dumps(batch))
    assert len(batch) == 2
    assert batch.packed is batch.packed
    assert batch.packed.uids == [experience(1).eid.uid, experience(2).eid.uid]
    assert [item.reward for item in batch.experiences] == [1.0, 2.0]
    [asked] = of_kind(script, pb.SampleRequest)
    assert asked.format == types_pb2.SAMPLE_FORMAT_PACKED
    with pytest.raises(InvalidRequestError, match="'trxp', 'packed'"):
        buffer.sample(2, format="arrow")  # type: ignore[arg-type]


def test_a_damaged_packed_batch_can_still_be_given_back(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1)])
    script._pack = lambda payloads: b"nonsense"
    batch = buffer.sample(1, format="packed")
    with pytest.raises(TrxpError):
        len(batch)
    batch.nack("damaged")
    assert script.nacked == [1]


def test_rewind_and_declare_safe_are_repeated(script: Any, buffer: Client) -> None:
    script.failures.append(UnavailableError("connection lost"))
    rewound = buffer.rewind(41, buffer="math", consumer="actor")
    assert (rewound.num_experiences, rewound.num_leases) == (101, 103)
    script.failures.append(UnavailableError("connection lost"))
    safe = buffer.declare_safe(127, buffer="math", consumer="actor")
    assert (safe.num_experiences, safe.safe_step) == (107, 127)
    back = pb.RewindRequest(buffer="math", consumer="actor", step=41)
    declared = pb.DeclareSafeRequest(buffer="math", consumer="actor", step=127)
    assert script.requests == [back, back, declared, declared]


def test_a_checkpoint_leads_back_to_its_step(script: Any, buffer: Client) -> None:
    state = buffer.state_dict(43, buffer="math", consumer="actor")
    assert script.requests == []
    assert state == {"version": 1, "buffer": "math", "consumer": "actor", "step": 43}
    result = buffer.load_state_dict(json.loads(json.dumps(state)))
    assert (result.num_experiences, result.num_leases) == (101, 103)
    assert script.requests == [pb.RewindRequest(buffer="math", consumer="actor", step=43)]
    assert buffer.state_dict(-1)["step"] == -1
    step = buffer.state_dict(torch.tensor(47))["step"]  # type: ignore[arg-type]
    assert (step, type(step)) == (47, int)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "what state_dict returned"),
        ([], "what state_dict returned"),
        ({"version": 2, "buffer": "b", "consumer": "c", "step": 1}, "version 2, this client"),
        ({"version": 1, "consumer": "c", "step": 1}, "buffer of the state is None"),
        ({"version": 1, "buffer": "b", "consumer": "c", "step": "1"}, "step is '1'"),
        ({"version": 1, "buffer": "b", "consumer": "c", "step": 1.0}, "step is 1.0"),
    ],
)
def test_a_state_of_something_else_is_refused(
    script: Any, buffer: Client, state: Any, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        buffer.load_state_dict(state)
    assert script.requests == []


def test_a_rewind_before_the_safe_step_is_refused(script: Any, buffer: Client) -> None:
    script.batches.append([payload(1)])
    buffer.sample(1, rank=0, world_size=2)
    script.failures.append(WrongStateError("step 3 is before the safe step 5"))
    with pytest.raises(WrongStateError, match="safe step 5"):
        buffer.rewind(3)
    buffer.sample(1, rank=0, world_size=2, timeout=0)
    assert of_kind(script, pb.SampleRequest)[-1].rank_of.after_lease_id == 1


def test_quarantine_is_released_once(script: Any, buffer: Client) -> None:
    assert buffer.release_quarantined([]) == 0
    assert script.requests == []
    assert buffer.release_quarantined("a", consumer="actor") == 113
    assert buffer.release_quarantined(["a", "b"], buffer="math") == 113
    assert buffer.release_quarantined() == 113
    assert script.requests == [
        pb.ReleaseQuarantinedRequest(buffer="default", consumer="actor", uids=["a"]),
        pb.ReleaseQuarantinedRequest(buffer="math", consumer="trainer", uids=["a", "b"]),
        pb.ReleaseQuarantinedRequest(buffer="default", consumer="trainer"),
    ]
    script.failures.append(UnavailableError("connection lost"))
    with pytest.raises(UnavailableError):
        buffer.release_quarantined()


def test_priorities_by_uid_are_set_and_repeated(script: Any, buffer: Client) -> None:
    script.failures.append(UnavailableError("connection lost"))
    result = buffer.update_priorities({"a": 0.5, "unknown": 2}, buffer="math")
    assert (result.num_updated, result.unknown_uids, result.outdated_uids) == (1, ("unknown",), ())
    first, again = script.requests
    assert first == again
    assert first == pb.UpdatePrioritiesRequest(
        buffer="math",
        updates=[
            pb.PriorityUpdate(uid="a", priority=0.5),
            pb.PriorityUpdate(uid="unknown", priority=2.0),
        ],
    )


def test_priorities_with_generations_are_not_repeated(script: Any, buffer: Client) -> None:
    entries = [("a", 0.5, 17), ("outdated", 3.0, 19)]
    result = buffer.update_priorities(iter(entries))
    assert (result.num_updated, result.outdated_uids) == (1, ("outdated",))
    assert [update.generation for update in script.requests[0].updates] == [17, 19]
    script.failures.append(UnavailableError("connection lost"))
    with pytest.raises(UnavailableError):
        buffer.update_priorities(entries)
    script.failures.append(UnavailableError("starting", retry_delay_seconds=0.001))
    assert buffer.update_priorities(entries).num_updated == 1


def test_many_priorities_go_in_several_requests(
    script: Any, buffer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_calls, "MAX_UPDATES", 3)
    uids = [f"{'unknown' if run % 2 else ''}{run}" for run in range(7)]
    result = buffer.update_priorities(dict.fromkeys(uids, 1.0))
    assert [len(request.updates) for request in script.requests] == [3, 3, 1]
    assert result.num_updated == 4
    assert result.unknown_uids == ("unknown1", "unknown3", "unknown5")
    assert buffer.update_priorities({}).num_updated == 0
    assert len(script.requests) == 3


@pytest.mark.parametrize(
    "entries",
    [
        [("a",)],
        [("a", "high")],
        ["ab"],
        [("a", 1.0, -1)],
        [("a", 1.0, 2, 3)],
        [("a", 1.0), ("a", 2.0)],
        {"a": None},
        [7],
    ],
)
def test_malformed_priorities_are_refused_before_any_is_sent(
    script: Any, buffer: Client, entries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_calls, "MAX_UPDATES", 1)
    with pytest.raises(InvalidRequestError, match="give"):
        buffer.update_priorities(entries)
    assert script.requests == []


def test_tasks_take_their_places(script: Any, buffer: Client) -> None:
    script.failures.append(UnavailableError("connection lost"))
    places = buffer.reserve_groups(["1/2", "1/3", "1/5"], buffer="math", ttl_seconds=53.0)
    assert places.granted == ("1/2", "1/3")
    assert (places.reason, places.retry_delay_seconds) == ("2 of 2 places are taken", 1.5)
    groups = ["1/2", "1/3", "1/5"]
    asked = pb.ReserveGroupsRequest(buffer="math", groups=groups, ttl_seconds=53.0)
    assert script.requests == [asked, asked]


def test_pacing_can_be_ended(script: Any, buffer: Client) -> None:
    pacing = Pacing(consumer="actor", max_staleness=1, batch_size=8)
    info = buffer.update_buffer("math", pacing=pacing)
    assert info.config == BufferConfig("math", pacing=pacing)
    assert buffer.update_buffer("math", pacing=None).config.pacing is None
    assert [list(request.update_mask.paths) for request in script.requests] == [["pacing"]] * 2
