"""A group with what was computed for it: as the trainer will get it, and how it came about."""

from __future__ import annotations

import pytest
import torch

from experience_buffer import GroupNotFoundError, trxp
from experience_buffer_server.buffer import present
from experience_buffer_server.buffer.intake.push_reading import Push
from tests.unit.buffer_verbs import pushed
from tests.unit.builders import World, experience, push, settle

GRPO = {"estimator": "grpo", "eps": 0.5}


async def test_advantages_are_told_as_computed_with_what_they_come_from(world: World) -> None:
    members = [experience(1, run) for run in range(3)]
    members[1].action_mask = torch.tensor([True, False, True, True, False, True, True])
    buffer = await world.computed(
        Push(payloads=[trxp.encode(members)]), group_size=3, advantage=GRPO
    )
    info = await present.group(buffer, "2/1")
    assert info.computation is not None
    assert info.computation["estimator"] == "grpo"
    assert info.computation["parameters.eps"] == 0.5
    assert (info.computation["votes"], info.computation["members"]) == (3, 3)
    assert info.computation["mean"] == pytest.approx(0.2)
    assert info.computation["std"] == pytest.approx(0.2)
    assert "mean_magnitude" not in info.computation
    low, middle, high = info.members
    assert low.advantage == pytest.approx((0.0 - 0.2) / (0.2 + 0.5))
    assert high.advantage == pytest.approx((0.4 - 0.2) / (0.2 + 0.5))
    assert (high.min_advantage, high.max_advantage) == (high.advantage, high.advantage)
    assert [m.num_trained_tokens for m in info.members] == [7, 5, 7]
    assert [m.per_token for m in info.members] == [False] * 3
    assert middle.advantage == pytest.approx(0.0, abs=1e-6)
    assert high.magnitude == pytest.approx(abs(high.advantage or 0.0))
    assert [place.state for place in high.places] == ["ready"]
    assert (await present.group(buffer, "2/1")).waits_for == ""


async def test_a_masked_group_trains_nothing_and_says_why(world: World) -> None:
    buffer = await world.computed(
        pushed((1, 0), (1, 1), reward=1.0),
        group_size=2,
        advantage={"estimator": "grpo", "zero_variance": "mask"},
    )
    info = await present.group(buffer, "2/1")
    assert [m.flags for m in info.members] == [("zero_variance", "masked")] * 2
    assert [(m.advantage, m.num_trained_tokens) for m in info.members] == [(None, 0)] * 2


async def test_one_that_cant_be_computed_tells_why_and_has_its_members(world: World) -> None:
    buffer = await world.holding(push((1, 0), dead=[(1, 1)]), group_size=2, advantage=GRPO)
    for entry in buffer.state.contents:
        if not entry.record.tombstone:
            buffer.state.contents.set_quarantine(entry, "no finite number")
    info = await present.group(buffer, "2/1")
    assert (info.state, info.waits_for, info.computation) == (
        "quarantined",
        "no finite number",
        None,
    )
    assert [(m.state, m.advantage) for m in info.members] == [
        ("quarantined", None),
        ("tombstone", None),
    ]


async def test_a_group_that_isnt_here_is_told_by_its_name(world: World) -> None:
    buffer = await world.holding(push((1, 0)), group_size=2)
    await settle(buffer)
    with pytest.raises(GroupNotFoundError, match="holds no member of group '2/7'"):
        await present.group(buffer, "2/7")
