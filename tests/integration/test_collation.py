"""Collation of what a server delivers: the same in both formats, however the buffer groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from experience_buffer import (
    EID,
    AdvantageConfig,
    BufferConfig,
    Client,
    ConsumerConfig,
    CustomField,
    Experience,
)
from experience_buffer.collation import (
    areal_collate,
    padded_collate,
    trl_collate,
    varlen_collate,
    verl_collate,
)
from tests.unit.client.test_collation_formats import assert_same

COLUMNS = ["task", "reward", "info"]
MAKERS = (
    padded_collate(pad_token_id=0, columns=COLUMNS),
    varlen_collate(columns=COLUMNS),
    verl_collate(pad_token_id=0, columns=COLUMNS),
    trl_collate(pad_token_id=0, columns=COLUMNS),
    areal_collate(columns=COLUMNS),
)


def rollout(task: int, run: int) -> Experience:
    length = 2 + task + run
    return Experience(
        eid=EID("0/eval", task, run, suffix="c0ffee"),
        tokens=list(range(1, 2 + length)),
        prompt_length=1,
        logprobs=[-0.5] * length,
        reward=float(run),
        multi_modal_inputs={"pixel_values": torch.ones(2 + run, 3)} if task else None,
        info={"weight": 0.5 * run, "model_version": 3},
        custom_fields=[CustomField("weight", "weight", torch.float32)],
        extra={"turn_rewards": torch.ones(1 + run)},
    )


@pytest.mark.parametrize("group_by", ["none", "run", "task"])
def test_both_formats_are_collated_alike(client: Client, name: str, group_by: Any) -> None:
    size = {"none": None, "run": 1, "task": 2}[group_by]
    config = BufferConfig(
        name,
        group_by=group_by,
        group_size=size,
        advantage=AdvantageConfig("grpo") if group_by == "task" else None,
        consumers=(ConsumerConfig("trainer"),),
    )
    client.create_buffer(config)
    client.push([rollout(task, run) for task in range(2) for run in range(2)], buffer=name)
    given: list[Any] = []
    for format in ("packed", "trxp"):
        batch = client.sample(4, buffer=name, format=format, timeout=10.0)
        given += [batch, batch.packed if format == "packed" else batch.experiences]
        batch.nack("look again")
    for collate in MAKERS:
        found = [collate(each) for each in given]
        for one, other in itertools.pairwise(found):
            assert_same(one, other)
        assert found[0]["weight"].tolist() == [0.0, 0.5, 0.0, 0.5]
        assert [len(each) for each in found[0]["multi_modal_inputs"]] == [0, 0, 1, 1]
        assert ("advantages" in found[0]) == (group_by == "task")
    verl = MAKERS[2](given[0])
    assert verl["uid"].tolist() == ["0/eval/0", "0/eval/0", "0/eval/1", "0/eval/1"]
