"""Advantages that come through the wire are those of the formulas, computed here in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from experience_buffer import Experience, trxp
from experience_buffer.v1 import service_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.integration.plain import NUM_RESPONSE, STORED, create, experience, push, sample, statuses

REWARDS = (0.1, 0.7, -0.3, 1.9, 0.7)
MASK = [True, False, True, True, False, True, True, True, False, True, False]


def decode(response: service_pb2.SampleResponse) -> list[Experience]:
    return [trxp.decode(one.payload)[0] for one in response.experiences]


def members(**fields: Any) -> list[Experience]:
    """A group with masked tokens, distinct values and unequal rewards."""
    generator = torch.Generator().manual_seed(5)
    return [
        experience(
            0,
            run,
            reward=reward,
            action_mask=MASK,
            extra={"values": torch.randn(NUM_RESPONSE, generator=generator)},
            **fields,
        )
        for run, reward in enumerate(REWARDS)
    ]


def rewards_32() -> list[float]:
    return [torch.tensor(reward, dtype=torch.float32).item() for reward in REWARDS]


def expected_grpo(eps: float) -> list[list[float]]:
    rewards = rewards_32()
    mean = sum(rewards) / 5
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 4)
    return [[(r - mean) / (std + eps) if valid else 0.0 for valid in MASK] for r in rewards]


def discounted(scores: Sequence[float], gamma: float) -> list[list[float]]:
    """Each score on the last valid token; masked tokens are no steps."""
    last = max(index for index, valid in enumerate(MASK) if valid)
    steps = [sum(MASK[index:last]) for index in range(len(MASK))]
    return [
        [score * gamma ** steps[i] if valid else 0.0 for i, valid in enumerate(MASK)]
        for score in scores
    ]


def expected_rloo(gamma: float) -> list[list[float]]:
    rewards = rewards_32()
    return discounted([r - (sum(rewards) - r) / 4 for r in rewards], gamma)


def expected_gae(gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    advantages, returns = [], []
    for member, reward in zip(members(), rewards_32(), strict=True):
        values = member.extra["values"].tolist()
        row, sums, following, next_value, left = [0.0] * 11, [0.0] * 11, 0.0, 0.0, reward
        for index in reversed([i for i, valid in enumerate(MASK) if valid]):
            following = left + gamma * next_value - values[index] + gamma * lam * following
            row[index], sums[index] = following, following + values[index]
            next_value, left = values[index], 0.0
        advantages.append(row)
        returns.append(sums)
    return advantages, returns


ESTIMATES: dict[str, tuple[str, dict[str, float], Callable[[], Any]]] = {
    "grpo": ("grpo", {}, lambda: (expected_grpo(1e-6),) * 2),
    "grpo_eps": ("grpo", {"eps": 0.25}, lambda: (expected_grpo(0.25),) * 2),
    "rloo": ("rloo", {"gamma": 0.75}, lambda: (expected_rloo(0.75),) * 2),
    "reinforce": ("reinforce", {"gamma": 0.5}, lambda: (discounted(rewards_32(), 0.5),) * 2),
    "gae": ("gae", {"gamma": 0.9, "lam": 0.8}, lambda: expected_gae(0.9, 0.8)),
}


@pytest.mark.parametrize("case", ESTIMATES)
def test_advantages_are_those_of_the_formula(
    stub: ExperienceBufferStub, name: str, case: str
) -> None:
    estimator, parameters, expected = ESTIMATES[case]
    create(stub, name, group_size=5, estimator=estimator, parameters=parameters)
    pushed = members()
    assert statuses(push(stub, name, pushed)) == [STORED] * 5
    response = sample(stub, name, 5)
    advantages, returns = expected()
    for before, after, advantage, value in zip(
        pushed, decode(response), advantages, returns, strict=True
    ):
        assert after.eid == before.eid
        assert after.advantages is not None
        assert after.returns is not None
        assert after.advantages.dtype == after.returns.dtype == torch.float32
        assert torch.allclose(after.advantages.double(), torch.tensor(advantage).double(), 1e-6)
        assert torch.allclose(after.returns.double(), torch.tensor(value).double(), 1e-6)
        assert after.extra["values"].equal(before.extra["values"])
    stored = stub.Get(service_pb2.GetRequest(buffer=name, uid=pushed[2].eid.uid))
    assert stored.payload == response.experiences[2].payload
