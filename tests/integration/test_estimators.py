"""Every estimator through gRPC: pushed, sampled, and compared with the loops of the unit tests."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from experience_buffer import AdvantageConfig, BufferConfig, Client, ConsumerConfig, Experience
from experience_buffer_server.advantages import ESTIMATORS, plan
from tests.integration.plain import NUM_RESPONSE, experience, states
from tests.integration.server import Stub, eventually
from tests.unit.advantages import reference
from tests.unit.advantages.reference_rewards import Member

TASKS, RUNS, STEPS = 3, 2, 2
NUM = TASKS * RUNS * STEPS

PARAMETERS: dict[str, dict[str, Any]] = {
    "grpo": {"eps": 0.25, "gamma": 0.875, "mask_mode": "count"},
    "dr_grpo": {"reward_clip": 0.75},
    "rloo": {"gamma": 0.9, "kl_coef": 0.05, "kl_estimator": "k3", "kl_clip": 5.0},
    "reinforce_baseline": {},
    "opmd": {"baseline": "logavgexp", "tau": 0.5},
    "asymre": {"shift": -0.25, "overlong_penalty": 0.5, "overlong_buffer": 7,
               "max_response_tokens": 9},
    "step_wise_grpo": {"divide_by_steps": True},
    "gigpo": {"step_weight": 0.5},
    "cpgd": {"weight": "std"},
    "reinforce": {"gamma": 0.5, "advantage_clip": 0.5},
    "reinforce_plus_plus": {"advantage_norm_ddof": 0},
    "remax": {"reward_bias": 0.5, "reward_scale": 3.0},
    "gae": {"gamma": 0.97, "lam": 0.9, "turn_rewards": "steps", "turn_discount": 0.5},
    "on_policy_distill": {"coefficient": 0.3, "cross_batch": "mean"},
}  # fmt: skip


def experiences() -> list[Experience]:
    """Three tasks of two runs of two steps; one task has equal rewards, states recur."""
    generator = random.Random(7)
    made = []
    for task in range(TASKS):
        for run in range(RUNS):
            for step in range(STEPS):
                reward = 0.3 if task == 1 else float(torch.tensor(generator.uniform(-2, 2)))
                mask = [generator.random() < 0.7 for _ in range(NUM_RESPONSE - 1)] + [task != 2]
                numbers = [torch.randn(NUM_RESPONSE) for _ in range(3)]
                made.append(
                    experience(
                        task,
                        run,
                        step=step,
                        reward=reward,
                        action_mask=mask,
                        truncate_status="response_truncated" if run else None,
                        values=torch.randn(NUM_RESPONSE + run),
                        logprobs=numbers[0],
                        ref_logprobs=numbers[1],
                        teacher_logprobs=numbers[2],
                        baseline_reward=0.25 * task,
                        env_state_hash=f"state {step}",
                    )
                )
    return made


def member(one: Experience, *, alone: bool) -> Member:
    values = one.values
    assert one.action_mask is not None
    assert values is not None

    def numbers(tensor: Any) -> list[float]:
        return [float(x) for x in tensor]

    return Member(
        reward=float(torch.tensor(one.reward, dtype=torch.float32)),
        mask=[bool(valid) for valid in one.action_mask],
        values=numbers(values[:NUM_RESPONSE]),
        bootstrap=float(values[-1]) if len(values) > NUM_RESPONSE else 0.0,
        logprobs=numbers(one.logprobs),
        ref_logprobs=numbers(one.ref_logprobs),
        teacher_logprobs=numbers(one.teacher_logprobs),
        baseline=one.baseline_reward or 0.0,
        state=one.env_state_hash or "",
        run="" if alone else one.eid.rid,
        step=one.eid.step,
    )


def expected(
    estimator: str, pushed: Sequence[Experience], parameters: dict[str, Any]
) -> dict[str, reference.Row]:
    computing = plan(estimator, parameters)
    keys = [e.eid.tid if computing.scope == "group" else e.eid.uid for e in pushed]
    groups = [
        [e for e, k in zip(pushed, keys, strict=True) if k == key] for key in dict.fromkeys(keys)
    ]
    members = [[member(e, alone=computing.scope == "item") for e in group] for group in groups]
    rows = reference.compute(estimator, members, plan=computing)
    flat = [e.eid.uid for group in groups for e in group]
    return dict(zip(flat, (row for of_group in rows for row in of_group), strict=True))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("estimator", sorted({spec.name for spec in ESTIMATORS.values()}))
def test_what_is_sampled_is_what_the_formula_says(
    client: Client, name: str, estimator: str, one_by_one: bool
) -> None:
    torch.manual_seed(11)
    pushed = experiences()
    parameters = PARAMETERS[estimator] | {"batch_wait_seconds": 0.0}
    size = TASKS if plan(estimator, parameters).scope == "group" else NUM
    parameters["batch_size"] = size
    client.create_buffer(
        BufferConfig(
            name=name,
            group_size=RUNS * STEPS,
            advantage=AdvantageConfig(estimator, parameters),
        )
    )
    if one_by_one:
        for one in random.Random(3).sample(pushed, NUM):
            client.push([one], buffer=name)
    else:
        client.push(pushed, buffer=name)
    rows = expected(estimator, pushed, parameters)
    batch = client.sample(NUM, buffer=name, timeout=60)
    assert len(batch.experiences) == NUM
    for found in batch.experiences:
        row = rows[found.eid.uid]
        for tensor, numbers in (
            (found.advantages, row.advantages),
            (found.returns, row.returns),
        ):
            assert tensor is not None
            assert tensor.dtype == torch.float32
            wanted = torch.tensor(numbers, dtype=torch.float64)
            assert torch.allclose(tensor.double(), wanted, rtol=2e-6, atol=2e-6), found.eid
    last = client.get(batch.uids[-1], buffer=name)
    assert last.payload == batch.payloads[-1]
    stored_config = client.get_buffer(name).config.advantage
    assert stored_config is not None
    assert stored_config.estimator == estimator


def test_late_fields_are_waited_for_and_computed_with(client: Client, name: str) -> None:
    """A critic reads what is stored, adds its values, and only then the trainer gets it."""
    client.create_buffer(
        BufferConfig(
            name=name,
            group_size=3,
            on_missing_field="wait",
            consumers=(ConsumerConfig("critic", raw=True), ConsumerConfig("actor", unit="group")),
            advantage=AdvantageConfig("gae", {"gamma": 0.5, "reward_norm_mean": "group"}),
        )
    )
    pushed = [experience(1, run, reward=float(run)) for run in range(3)]
    client.push(pushed, buffer=name)
    (stats,) = client.get_stats(name).buffers
    assert stats.num_waiting_for_fields == 3
    assert "wait for fields" in stats.computing_waits_for
    assert {one.state for one in client.list(buffer=name)} == {"waiting_for_fields"}
    batch = client.sample(3, buffer=name, consumer="critic", timeout=30)
    assert all(one.advantages is None for one in batch.experiences)
    late = {one.eid.uid: {"values": torch.ones(NUM_RESPONSE)} for one in batch.experiences}
    client.annotate(late, buffer=name).raise_for_refused()
    client.annotate(late, buffer=name).raise_for_refused()
    batch = client.sample(1, buffer=name, consumer="actor", timeout=60)
    by_run = {one.eid.run: one for one in batch.experiences}
    for run in range(3):
        advantages = by_run[run].advantages
        assert advantages is not None
        # Reward minus the mean of 1, on the last token, minus the critic's value.
        assert float(advantages[-1]) == run - 2
        assert by_run[run].values is not None
    stored = client.get(pushed[2].eid.uid, buffer=name)
    assert stored.computation is not None
    assert stored.computation["estimator"] == "gae"
    assert stored.computation["parameters.gamma"] == 0.5
    refused = client.annotate(
        {pushed[0].eid.uid: {"reward": 9.0}}, buffer=name, raise_on_refused=False
    )
    assert [outcome.reason for outcome in refused.outcomes] == ["delivered"]


def test_flags_say_what_is_special(client: Client, name: str) -> None:
    client.create_buffer(
        BufferConfig(
            name=name,
            group_size=2,
            advantage=AdvantageConfig("grpo", {"zero_variance": "mask"}),
        )
    )
    client.push([experience(1, run, reward=0.3) for run in range(2)], buffer=name)
    batch = client.sample(2, buffer=name, timeout=60)
    assert [set(flags) for flags in batch.flags] == [{"zero_variance", "masked"}] * 2
    for one in batch.experiences:
        assert one.action_mask is not None
        assert not one.action_mask.any()


def test_numbers_that_cannot_be_computed_with_are_quarantined(
    client: Client, stub: Stub, name: str
) -> None:
    """Each of them is a float32, so that the gate lets them pass; their sum is none."""
    gae = AdvantageConfig("gae")
    client.create_buffer(BufferConfig(name, group_by="none", advantage=gae))
    fields = {"values": [0.5] * NUM_RESPONSE, "token_level_reward": [3e38] * NUM_RESPONSE}
    assert client.push([experience(1, 0, info=fields)], buffer=name).num_stored == 1
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
