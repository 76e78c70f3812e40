"""The order in which units come, for every kind of selector, over items and over groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from experience_buffer import (
    AdvantageConfig,
    Batch,
    Client,
    ConsumerConfig,
    Experience,
    Limiter,
    Selector,
)
from tests.integration.buffers import create
from tests.integration.plain import experience

DRAWS = 600
VERSIONS = [5, 9, 2, 9, 7]
REWARDS = [0.5, 2.0, -1.0, 0.25, 1.0]
LENGTHS = [5, 3, 11, 2, 7]
PRIORITIES = [2.0, 0.5, 1.0, 4.0, 0.0]


def member(task: int, run: int) -> Experience:
    """An experience whose version, reward, length and priority tell its task."""
    num_tokens = LENGTHS[task]
    return experience(
        task,
        run,
        tokens=torch.arange(2 + num_tokens, dtype=torch.int32),
        logprobs=torch.zeros(num_tokens),
        reward=REWARDS[task] + (run - 0.5) / 64,
        info={"version_start": VERSIONS[task], "priority": PRIORITIES[task]},
    )


def fill(client: Client, name: str, unit: Any, selector: Selector, **consumer: Any) -> None:
    """A buffer with five tasks of two runs, and a trainer that chooses among them."""
    options = {"unit": unit, "selector": selector, "on_future_version": "deliver"} | consumer
    create(client, name, 2, **options)
    client.push([member(task, run) for task in range(5) for run in range(2)], buffer=name)
    client.publish_policy_version(9, buffer=name)


def tasks(batch: Batch) -> list[int]:
    """The task of each unit, in the order of delivery."""
    seen = dict.fromkeys(zip(batch.groups, batch.uids, strict=True))
    by_unit = [group for group, _ in seen]
    if batch.num_units < len(batch):
        by_unit = by_unit[::2]
    return [int(group.rpartition("/")[2]) for group in by_unit]


@pytest.mark.parametrize(
    ("selector", "order"),
    [
        (Selector("fifo"), [0, 1, 2, 3, 4]),
        (Selector("lifo"), [4, 3, 2, 1, 0]),
        (Selector("min"), [4, 1, 2, 0, 3]),
        (Selector("max"), [3, 0, 2, 1, 4]),
        (Selector("min", key="reward"), [2, 3, 0, 4, 1]),
        (Selector("max", key="reward"), [1, 4, 0, 3, 2]),
        (Selector("min", key="response_tokens"), [3, 1, 0, 4, 2]),
        (Selector("max", key="response_tokens"), [2, 4, 0, 1, 3]),
        (Selector("freshest"), [3, 1, 4, 0, 2]),
    ],
    ids=lambda value: f"{value.kind}-{value.key}" if isinstance(value, Selector) else "",
)
def test_groups_come_in_the_order_that_was_asked_for(
    client: Client, name: str, selector: Selector, order: list[int]
) -> None:
    fill(client, name, "group", selector)
    first = client.sample(3, buffer=name)
    assert set(first.probabilities) == {1.0}, "the order is fixed"
    rest = client.sample(2, buffer=name)
    found = tasks(first) + tasks(rest)
    if selector.kind == "freshest":
        assert set(found[:2]) == {1, 3}, "of the same version"
        found, order = found[2:], order[2:]
    assert found == order
    first.nack()
    assert sorted(tasks(client.sample(3, buffer=name))) == sorted(tasks(first))


@pytest.mark.parametrize(
    ("selector", "weights"),
    [
        (Selector("uniform", seed=11), [1, 1, 1, 1, 1]),
        (Selector("prioritized", seed=11), [2, 0.5, 1, 4, 0]),
        (Selector("prioritized", exponent=2, seed=11), [4, 0.25, 1, 16, 0]),
        (Selector("prioritized", exponent=0, seed=11), [1, 1, 1, 1, 1]),
        (Selector("staleness", decay=0.75, seed=11), [0.75 ** (9 - v) for v in VERSIONS]),
    ],
    ids=lambda value: f"{value.kind}-{value.exponent:g}" if isinstance(value, Selector) else "",
)
@pytest.mark.parametrize("unit", ["group", "item"])
def test_draws_have_the_distribution_that_they_report(
    client: Client, name: str, unit: str, selector: Selector, weights: list[float]
) -> None:
    fill(client, name, unit, selector, replay=True, with_replacement=True)
    batch = client.sample(DRAWS, buffer=name)
    assert batch.num_units == DRAWS
    members = 2 if unit == "group" else 1
    assert len(batch) == DRAWS * members
    counts: Counter[int] = Counter()
    for uid, probability in zip(batch.uids, batch.probabilities, strict=True):
        task = int(uid.split("/")[1])
        counts[task] += 1
        # Items: both members of a task are as probable as each other.
        share = weights[task] / sum(weights) / (1 if unit == "group" else 2)
        assert probability == pytest.approx(share)
    for task, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations of a binomial: with a seed it passes always or never.
        play = 5 * (share * (1 - share) / DRAWS) ** 0.5
        assert counts[task] / len(batch) == pytest.approx(share, abs=play + 1e-12)


def test_large_advantages_are_drawn_more_often(client: Client, name: str) -> None:
    selector = Selector("advantage", exponent=1, seed=3)
    options = {"limiter": Limiter(min_size=4), "advantage": AdvantageConfig("grpo")}
    drawn = {"selector": selector, "replay": True, "with_replacement": True}
    create(client, name, 4, unit="item", **options, **drawn)
    rewards = [0.0, 0.125, 0.25, 4.0]
    client.push([experience(0, run, reward=rewards[run]) for run in range(4)], buffer=name)
    batch = client.sample(DRAWS, buffer=name)
    magnitude = {
        uid: float(one.advantages.abs().mean())
        for uid, one in zip(batch.uids, batch.experiences, strict=True)
        if one.advantages is not None
    }
    assert len(magnitude) == 4
    total = sum(magnitude.values())
    counts = Counter(batch.uids)
    for uid, probability in zip(batch.uids, batch.probabilities, strict=True):
        assert probability == pytest.approx(magnitude[uid] / total, rel=1e-5)
    for uid, size in magnitude.items():
        share = size / total
        play = 5 * (share * (1 - share) / DRAWS) ** 0.5
        assert counts[uid] / DRAWS == pytest.approx(share, abs=play)


def test_without_replacement_probabilities_are_those_of_the_draw(client: Client, name: str) -> None:
    fill(client, name, "group", Selector("uniform"))
    batch = client.sample(5, buffer=name)
    assert sorted(tasks(batch)) == [0, 1, 2, 3, 4], "each once"
    assert batch.probabilities[::2] == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1])
    batch.nack()
    second = client.sample(2, buffer=name)
    assert second.probabilities[::2] == pytest.approx([1 / 5, 1 / 4])


def test_the_order_can_be_changed_while_units_wait(client: Client, name: str) -> None:
    fill(client, name, "group", Selector("fifo"))
    first = client.sample(1, buffer=name)
    trainer = ConsumerConfig("trainer", "group", selector=Selector("max", key="reward"))
    client.update_buffer(name, consumers=(trainer,))
    assert tasks(client.sample(3, buffer=name)) == [1, 4, 3]
    first.nack()
    assert tasks(client.sample(2, buffer=name)) == [0, 2], "the lease of before is valid"
