"""What is left out, mistyped or of another kind ends in a sentence that says what to do, not in training."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from experience_buffer import (
    EID,
    AdvantageConfig,
    AsyncClient,
    BufferConfig,
    Client,
    ConsumerConfig,
    Experience,
    GroupNotFoundError,
    PushRefusedError,
    Staleness,
    Tombstone,
)
from tests.integration.server import Server

TRAINER = (ConsumerConfig("trainer", "group"),)
NAME = "slips"


@pytest.fixture
def client(shared_server: Server) -> Iterator[Client]:
    with Client(shared_server.address, timeout=30.0) as client:
        yield client


def create(client: Client, **settings: Any) -> str:
    """A buffer with a name of its own."""
    config = BufferConfig(f"{NAME}-{secrets.token_hex(4)}", **settings)
    client.create_buffer(config)
    return config.name


def rollout(*eid: Any, **fields: Any) -> Experience:
    content: dict[str, Any] = {"tokens": [5, 6, 7], "prompt_length": 1, "reward": 0.5}
    return Experience(eid=EID(*eid), **(content | fields))


def refusals(client: Client, members: list[Experience], buffer: str) -> Iterator[list[str]]:
    """Why those that are refused are, however they are pushed."""
    result = client.push(members, buffer=buffer, raise_on_refused=False)
    yield [outcome.message for outcome in result.refused]
    with client.writer(buffer=buffer) as writer:
        for member in members:
            writer.append(member)
        with pytest.raises(PushRefusedError) as raised:
            writer.flush()
    yield [outcome.message for outcome in raised.value.result.refused]

    async def pushed() -> list[str]:
        async with AsyncClient(client.address, timeout=30.0) as own:
            result = await own.push(members, buffer=buffer, raise_on_refused=False)
            return [outcome.message for outcome in result.refused]

    yield asyncio.run(pushed())


@pytest.mark.parametrize("group_by", ["task", "run", "step"])
def test_unrelated_prompts_are_no_group(client: Client, group_by: str) -> None:
    grpo = AdvantageConfig("grpo")
    buffer = create(client, group_by=group_by, group_size=4, advantage=grpo, consumers=TRAINER)
    prompts = [rollout(reward=float(number)) for number in range(4)]
    for messages in refusals(client, prompts, buffer):
        assert len(messages) == 4
        assert {message.partition(",")[0] for message in messages} == {
            "eid has neither batch nor task"
        }
    with pytest.raises(PushRefusedError, match=r"set eid = EID\(batch=..., task=...\)"):
        client.push([], tombstones=[Tombstone(EID(run=3), "gone")], buffer=buffer)
    assert client.get_buffer(buffer).num_items == 0


def test_one_text_of_two_tasks_is_two_groups(client: Client) -> None:
    grpo = AdvantageConfig("grpo")
    buffer = create(client, group_size=2, advantage=grpo, consumers=TRAINER)
    pairs: list[tuple[Any, Any]] = [("0/eval", 1), (0, "eval/1"), ("0/eval", "1"), ("0", "eval/1")]
    members = [rollout(*pair, number, reward=float(number)) for number, pair in enumerate(pairs)]
    client.push(members, buffer=buffer)
    batch = client.sample(2, buffer=buffer)
    assert {(one.eid.tid, one.reward) for one in batch.experiences} == {
        ("0/eval/1", 0.0), ("0/eval/1", 2.0), ("0/eval%2F1", 1.0), ("0/eval%2F1", 3.0),
    }  # fmt: skip
    found = [summary.uid for summary in client.list(buffer=buffer, tid=EID(0, "eval/1").tid)]
    assert sorted(found) == sorted(one.eid.uid for one in members[1::2])
    client.ack(batch.lease_id, buffer=buffer)
    client.push([rollout(3, "openai/gsm8k")], buffer=buffer)
    with pytest.raises(GroupNotFoundError, match=r"'3/openai%2Fgsm8k' is here"):
        client.seal_group("3/openai/gsm8k", buffer=buffer)
    client.seal_group(EID(3, "openai/gsm8k").tid, buffer=buffer)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "info['model_version'] is missing"),
        ({"info": {"model_versoin": 3}}, "did you mean it by info['model_versoin']?"),
        ({"info": {"model_version": "3"}}, "info['model_version'] is '3'; a policy version is a"),
        ({"info": {"model_version": 3.5}}, "info['model_version'] is 3.5; a policy version is a"),
        ({"info": {"model_version": True}}, "info['model_version'] is True; a policy version is"),
        ({"info": {"model_version": -3}}, "info['model_version'] is -3, and the staleness of"),
        ({"versions": [-1, -1]}, "no token has a version of 0 or more"),
    ],
)
def test_what_says_no_version_is_not_fresh(
    client: Client, fields: dict[str, Any], what: str
) -> None:
    window = ConsumerConfig("trainer", staleness=Staleness(max_lag=2))
    buffer = create(client, consumers=(window,))
    client.publish_policy_version(9, buffer=buffer)
    for (message,) in refusals(client, [rollout(0, 0, **fields)], buffer):
        assert what in message
    assert not client.sample(1, buffer=buffer, timeout=0)


def test_what_was_stored_before_a_window_is_held_for_its_version(client: Client) -> None:
    buffer = create(client, consumers=(ConsumerConfig("trainer"),))
    old = rollout(0, 0)
    client.push([old], buffer=buffer)
    window = ConsumerConfig("trainer", staleness=Staleness(max_lag=2))
    client.update_buffer(buffer, consumers=(window,))
    client.publish_policy_version(9, buffer=buffer)
    batch = client.sample(1, buffer=buffer, timeout=0)
    assert "1 held because no policy version is known" in batch.shortfall
    (summary,) = client.list(buffer=buffer)
    assert summary.state == "held"
    assert "max_lag = 2" in summary.message
    client.annotate({old.eid.uid: {"info": {"model_version": 8}}}, buffer=buffer)
    batch = client.sample(1, buffer=buffer)
    assert batch.staleness == (1,)


@pytest.mark.parametrize(
    ("estimator", "fields", "what"),
    [
        ("grpo", {"reward": math.nan}, "reward is nan"),
        ("gae", {"values": [0.0, math.nan]}, "values is nan at response token 1"),
        ("gae", {"values": [0.0]}, "values has shape [1] but the response has 2 tokens"),
        ("reinforce", {"token_level_reward": [math.inf, 0.0]}, "token_level_reward is inf"),
        ("grpo", {"versions": torch.tensor([[3, 3]])}, "versions has shape [1, 2]"),
        ("grpo", {"versions": [3]}, "versions has 1 values but the response has 2 tokens"),
    ],
)
def test_what_an_estimator_cannot_read_is_not_stored(
    client: Client, estimator: str, fields: dict[str, Any], what: str
) -> None:
    buffer = create(client, advantage=AdvantageConfig(estimator), group_size=2)
    member = rollout(0, 0, **({"values": [0.0, 0.0]} | fields))
    for (message,) in refusals(client, [member], buffer):
        assert what in message


@pytest.mark.parametrize(
    ("estimator", "fields", "floats"),
    [
        ("grpo", {"action_mask": torch.tensor([1.0, 0.0])}, {"action_mask": [True, False]}),
        ("grpo", {"reward": True}, {"reward": 1.0}),
        ("grpo", {"reward": 1}, {"reward": 1.0}),
        ("gae", {"values": torch.tensor([2, 3])}, {"values": [2.0, 3.0]}),
        ("reinforce", {"token_level_reward": torch.tensor([True, False])},
         {"token_level_reward": [1.0, 0.0]}),
    ],
)  # fmt: skip
def test_other_numbers_are_read_exactly(
    client: Client, estimator: str, fields: dict[str, Any], floats: dict[str, Any]
) -> None:
    found = []
    for own in (fields, floats):
        buffer = create(client, advantage=AdvantageConfig(estimator), group_size=2)
        more = {"values": [0.0, 0.0]}
        members = [rollout(0, 0, 0, **more), rollout(0, 0, 1, **(more | own))]
        client.push(members, buffer=buffer)
        batch = client.sample(2, buffer=buffer)
        both = sorted(batch.experiences, key=lambda one: one.eid.run)
        found.append([one.advantages.tolist() for one in both if one.advantages is not None])
    assert found[0] == found[1]
    assert len(found[0]) == 2
