"""Payloads of the real Trinity-RFT class through a real server and back into the real class."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from trinity.common import experience as trinity

from experience_buffer import Client, trxp
from tests.integration.plain import STORED, create, push, sample, statuses
from tests.integration.server import Server, Stub

REWARDS = (0.25, 1.5, -0.75, 0.1, 0.1, 2.0, -1.0)
NUM_PROMPT, NUM_RESPONSE = 5, 17


def their_experience(run: int) -> Any:
    """One member of a group; each run fills other fields of the real class."""
    generator = torch.Generator().manual_seed(run)
    tokens = torch.randint(0, 151_643, (NUM_PROMPT + NUM_RESPONSE,), generator=generator)
    logprobs = -torch.rand(NUM_RESPONSE, generator=generator)
    fields: dict[str, Any] = {
        "eid": trinity.EID(batch="0/eval_x", task="a/b", run=run, step=3, suffix=f"{run:06x}"),
        "tokens": tokens.int(),
        "prompt_length": NUM_PROMPT,
        "logprobs": logprobs,
        "reward": REWARDS[run],
        "info": {"model_version": 7 + run, "nested": {"list": [1, (2.5, None)], "东": b"\x00"}},
        "metrics": {"accuracy": run / 7},
        "prompt_text": "naïve \U0001f600\x00",
        "response_text": f"response {run}",
    }
    others: list[dict[str, Any]] = [
        {},
        {
            "action_mask": torch.rand(NUM_RESPONSE, generator=generator) > 0.4,
            "messages": [{"role": "user", "content": "q"}, {"role": "tool", "calls": [{}]}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        {"logprobs": logprobs.bfloat16(), "action_mask": torch.ones(NUM_RESPONSE).long()},
        {"teacher_logprobs": logprobs, "token_level_reward": logprobs * 2},
        {"routed_experts": torch.randint(0, 64, (21, 3, 2), generator=generator).byte()},
        {"multi_modal_inputs": {"": torch.zeros(0, 3), "a:b": torch.rand(2, 3).half()}},
        {
            "custom_fields": [trinity.CustomField("model_version", "versions", torch.int64)],
            "truncate_status": "response_truncated",
        },
    ]
    return trinity.Experience(**(fields | others[run]))


GROUP = [their_experience(run) for run in range(7)]
MEAN = math.fsum(REWARDS) / 7
STD = math.sqrt(math.fsum((reward - MEAN) ** 2 for reward in REWARDS) / 6)


def same(one: Any, other: Any) -> bool:
    """Equal, tensors bit for bit and with their dtype and shape."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.equal(other)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, trinity.CustomField | trinity.EID):
        return same(vars(one), vars(other))
    return bool(one == other) and type(one) is type(other)


def check(received: Any, original: Any, reward: float) -> None:
    """`received` is what upstream's own round trip of `original` gives, advantages added."""
    expected = trinity.Experience.deserialize(original.serialize())
    for name, value in vars(expected).items():
        if name not in ("advantages", "returns"):
            assert same(value, getattr(received, name)), name
    mask = expected.action_mask.bool()
    score = (reward - MEAN) / (STD + 1e-6)
    for tensor in (received.advantages, received.returns):
        assert tensor.dtype == torch.float32
        wanted = torch.where(mask, torch.tensor(score, dtype=torch.float64), 0.0)
        assert torch.allclose(tensor.double(), wanted, rtol=1e-6)


@pytest.mark.parametrize("way", ["stub", "client", "singles"])
def test_their_payloads_come_back_with_advantages(
    shared_server: Server, stub: Stub, name: str, way: str
) -> None:
    create(stub, name, group_size=7, estimator="grpo", consumers={"trainer": "group"})
    payload = trinity.Experience.serialize_many(GROUP)
    if way == "stub":
        assert statuses(push(stub, name, payload)) == [STORED] * 7
    elif way == "singles":
        for member in GROUP:
            assert statuses(push(stub, name, member.serialize())) == [STORED]
    else:
        with Client(shared_server.address) as client:
            assert client.push(payload, buffer=name).num_stored == 7
    response = sample(stub, name, 1)
    assert [one.group for one in response.experiences] == ["0/eval_x/a%2Fb"] * 7
    for one, original, reward in zip(response.experiences, GROUP, REWARDS, strict=True):
        assert one.uid == original.eid.uid
        check(trinity.Experience.deserialize(one.payload), original, reward)
        added = trinity.Experience.deserialize(one.payload)
        added.advantages = added.returns = None
        single = trinity.Experience.deserialize(original.serialize())
        assert added.serialize() == single.serialize(), "nothing else has changed"
    merged = trinity.Experience.deserialize_many(
        trxp.merge([one.payload for one in response.experiences])
    )
    for received, original, reward in zip(merged, GROUP, REWARDS, strict=True):
        check(received, original, reward)


def test_our_client_writes_what_their_class_reads(shared_server: Server, name: str) -> None:
    with Client(shared_server.address) as client:
        client.create_buffer(name)
        ours = trxp.decode(trinity.Experience.serialize_many(GROUP))
        client.push(ours, buffer=name)
        batch = client.sample(7, buffer=name)
        for payload, original in zip(batch.payloads, GROUP, strict=True):
            received = trinity.Experience.deserialize(payload)
            expected = trinity.Experience.deserialize(original.serialize())
            assert all(same(value, getattr(received, key)) for key, value in vars(expected).items())


def test_their_dpo_pairs_pass_through(stub: Stub, name: str) -> None:
    create(stub, name)
    pair = trinity.Experience(
        eid=trinity.EID(task=0, suffix="dpo"),
        tokens=torch.arange(3),
        chosen=torch.arange(5),
        rejected=torch.arange(7),
        chosen_messages=[{"role": "assistant", "content": "yes"}],
    )
    assert statuses(push(stub, name, pair.serialize())) == [STORED]
    [one] = sample(stub, name, 1).experiences
    assert one.payload == pair.serialize()
    received = trinity.Experience.deserialize(one.payload)
    assert (received.chosen.tolist(), received.rejected.tolist()) == ([*range(5)], [*range(7)])
