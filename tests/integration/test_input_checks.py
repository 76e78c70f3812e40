"""Inputs that can't be read, on a real server: one is refused, its neighbours in the call stay."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

from experience_buffer import AdvantageConfig, BufferConfig, Client
from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.plain import (
    NUM_RESPONSE,
    REFUSED,
    STORED,
    experience,
    push,
    states,
    statuses,
)
from tests.integration.server import Stub, eventually

INVALID = types_pb2.ANNOTATE_REFUSAL_INVALID
T = NUM_RESPONSE


def create(client: Client, name: str, estimator: str, **more: Any) -> None:
    advantage = AdvantageConfig(estimator, more.pop("parameters", {}))
    client.create_buffer(BufferConfig(name=name, group_by="none", advantage=advantage, **more))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (float("nan"), "info['baseline_reward'] is nan; send a finite number"),
        (float("inf"), "info['baseline_reward'] is inf; send a finite number"),
        (1e39, "info['baseline_reward'] is 1e+39; send baseline_reward as"),
        ([1.0], "info['baseline_reward'] is a list; send baseline_reward as"),
        (True, "info['baseline_reward'] is True; send baseline_reward as"),
    ],
)
def test_one_annotation_is_invalid_and_the_next_is_stored(
    client: Client, stub: Stub, name: str, entry: Any, message: str
) -> None:
    create(client, name, "remax", on_missing_field="wait")
    pushed = [experience(1, run, reward=1.5) for run in range(2)]
    client.push(pushed, buffer=name)
    request = service_pb2.AnnotateRequest(buffer=name)
    for one, value in zip(pushed, (entry, 0.5), strict=True):
        request.annotations.add(uid=one.eid.uid).info["baseline_reward"] = value
    bad, sound = stub.Annotate(request).outcomes
    assert (bad.refusal, sound.refusal) == (INVALID, 0)
    assert message in bad.message
    (stored,) = client.sample(1, buffer=name, timeout=60).experiences
    assert stored.eid == pushed[1].eid
    assert stored.advantages is not None
    assert float(stored.advantages[0]) == 1.0
    assert {one.uid: one.state for one in client.list(buffer=name)}[pushed[0].eid.uid] == (
        "waiting_for_fields"
    )


def test_values_in_info_are_computed_with_and_bad_ones_refused(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name, "gae")
    sound = [0.25] * T
    outcomes = push(
        stub,
        name,
        [
            experience(1, 0, info={"values": sound}),
            experience(1, 1, info={"values": sound[1:]}),
            experience(1, 2, info={"values": "0.25"}),
            experience(1, 3, info={"values": sound}, extra={"values": torch.zeros(T)}),
            experience(1, 4, extra={"values": torch.full((T,), 0.25)}),
        ],
    )
    assert statuses(outcomes) == [STORED, REFUSED, REFUSED, REFUSED, STORED]
    assert {o.reason for o in outcomes} == {0, types_pb2.REFUSAL_REASON_INVALID}
    assert all("info['values']" in outcome.message for outcome in outcomes[1:4])
    batch = client.sample(2, buffer=name, timeout=60)
    for one in batch.experiences:
        assert one.advantages is not None
        assert float(one.advantages[0]) == pytest.approx(one.eid.run / 3.0 - 0.25)


def test_numbers_that_cannot_be_computed_with_are_quarantined(
    client: Client, stub: Stub, name: str
) -> None:
    """A masked slot may hold NaN, so that the gate lets it pass; here all slots are valid."""
    create(client, name, "gae")
    values = [0.5] * (T - 1) + [float("nan")]
    outcomes = push(stub, name, [experience(1, 0, info={"values": values})])
    assert statuses(outcomes) == [STORED]
    eventually(lambda: states(stub, name) == ["quarantined"], "it to be quarantined")


def test_a_computation_says_what_it_has_counted_and_of_which_batch(
    client: Client, name: str
) -> None:
    """Counts are whole numbers; the batch is known by its members, as docs/advantages.md says."""
    parameters: dict[str, Any] = {
        "running_norm": "mean_std",
        "batch_size": 2,
        "cross_batch": "mean",
    }
    client.create_buffer(
        BufferConfig(name=name, group_size=2, advantage=AdvantageConfig("rloo", parameters))
    )
    pushed = [experience(task, run) for task in range(2) for run in range(2)]
    client.push(pushed, buffer=name)
    client.sample(4, buffer=name, timeout=60)
    computation = client.get(pushed[0].eid.uid, buffer=name).computation
    assert computation is not None
    counts = {"members", "votes", "batch_groups", "batch_members", "running_count"}
    assert counts <= computation.keys()
    assert {type(computation[key]) for key in counts} == {int}
    assert type(computation["mean"]) is float
    text = json.dumps(sorted(one.eid.uid for one in pushed))
    assert computation["batch_id"] == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
