"""What must not change a bit of a result, and what batch-level statistics depend on."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages import (
    ESTIMATORS,
    ExperienceInput,
    GroupFailure,
    GroupResult,
    compute,
)
from experience_buffer_server.advantages.plan.specs import plan
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from .builders import computed, failed, floats
from .cases import Case, Drawer, draw_parameters, without_idle
from .devices import DEVICES, TORCH_DEVICES
from .test_agreement import SEEDS, fields_for

Outcomes = list[GroupResult | GroupFailure]

WITHOUT_BATCH = {
    "reward_norm_mean": "group", "reward_norm_std": "group", "advantage_norm_mean": "group",
    "advantage_norm_std": "group", "cross_batch": "none",
}  # fmt: skip
"""Statistics of a batch, replaced by those of a group."""


def draw(
    estimator: str, seed: int, num_groups: int, *, batch: bool, running: bool = False
) -> tuple[Case, dict[str, Any]]:
    """A launch and parameters: with statistics over a batch or without any."""
    parameters = dict(draw_parameters(ESTIMATORS[estimator].parameters, seed, likely=0.25))
    known = {field.name for field in dataclasses.fields(ESTIMATORS[estimator].parameters)}
    if not batch:
        for name, value in WITHOUT_BATCH.items():
            if name in known and getattr(plan(estimator, parameters).parameters, name) != "none":
                parameters[name] = value
        assert estimator == "cpgd" or not plan(estimator, parameters).parameters.uses_batch
    parameters.pop("running_norm", None)
    if running:
        parameters["running_norm"] = "mean_std" if seed % 2 else "std"
    case = Drawer(seed, fields=fields_for(estimator, parameters), long=True).case(num_groups)
    return case, parameters


def reordered(outcome: GroupResult | GroupFailure, order: Sequence[int]) -> GroupResult:
    result = computed(outcome)
    return GroupResult(items=tuple(result.items[m] for m in order), details=result.details)


ALONE = [name for name in ESTIMATORS if name != "cpgd"]
"""Those that need no batch."""
LAUNCHES = settings(max_examples=12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("estimator", ALONE)
@LAUNCHES
@given(seed=SEEDS, num_groups=st.integers(1, 5))
def test_order_neighbours_and_threads_change_no_bit(
    estimator: str, device: str, seed: int, num_groups: int
) -> None:
    case, parameters = draw(estimator, seed, num_groups, batch=False)
    how: dict[str, Any] = {"estimator": estimator, "parameters": parameters, "device": device}
    together = compute(case.inputs, **how)
    assert together == [compute([group], **how)[0] for group in case.inputs]
    assert together == compute(case.inputs, **how, threads=2)
    cut = random.Random(seed).randint(0, num_groups)
    assert together == compute(case.inputs[:cut], **how) + compute(case.inputs[cut:], **how)

    shuffler = random.Random(seed + 1)
    groups = shuffler.sample(range(num_groups), num_groups)
    members = [shuffler.sample(range(len(g)), len(g)) for g in case.inputs]
    shuffled = compute([[case.inputs[g][m] for m in members[g]] for g in groups], **how)
    assert shuffled == [reordered(together[g], members[g]) for g in groups]


def broken(case: Case, estimator: str, how: int) -> list[ExperienceInput]:
    """A group like the others, with something that makes it fail."""
    members = [member for group in case.inputs for member in group][:3]
    first = members[0] if members else Drawer(1, fields=frozenset()).experience("", 0, None)[1]
    bad = dataclasses.replace(first, mask=dataclasses.replace(first.mask, dtype="C64"))
    if how == 1 and estimator != "on_policy_distill":
        bad = dataclasses.replace(first, reward=math.nan, token_level_reward=None)
    return [*members[1:], bad]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@LAUNCHES
@given(seed=SEEDS, num_groups=st.integers(1, 4), how=st.integers(0, 1), where=st.integers(0, 4))
def test_a_failing_group_changes_no_bit_of_its_neighbours(
    estimator: str, device: str, seed: int, num_groups: int, how: int, where: int
) -> None:
    running = seed % 3 == 0 and estimator != "on_policy_distill"
    case, parameters = draw(estimator, seed, num_groups, batch=True, running=running)
    where = min(where, num_groups)
    bad = broken(case, estimator, how)
    batch = [*case.batches, case.batches[-1]][where]
    alone, joined = RunningMoments(), RunningMoments()
    given: dict[str, Any] = {"estimator": estimator, "parameters": parameters, "device": device}
    expected = compute(case.inputs, **given, batches=case.batches, moments=alone)
    outcomes = compute(
        [*case.inputs[:where], bad, *case.inputs[where:]],
        **given,
        batches=[*case.batches[:where], batch, *case.batches[where:]],
        moments=joined,
    )
    failed(outcomes.pop(where))
    assert outcomes == expected
    assert joined.to_json() == alone.to_json()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@LAUNCHES
@given(seed=SEEDS, num_groups=st.integers(1, 5))
def test_statistics_of_a_batch_depend_on_exactly_that_batch(
    estimator: str, device: str, seed: int, num_groups: int
) -> None:
    case, parameters = draw(estimator, seed, num_groups, batch=True)
    if "cross_batch" in {f.name for f in dataclasses.fields(ESTIMATORS[estimator].parameters)}:
        parameters["cross_batch"] = "mean_std"
    how: dict[str, Any] = {"estimator": estimator, "parameters": parameters, "device": device}
    together = compute(case.inputs, **how, batches=case.batches)
    assert together == compute(case.inputs, **how, batches=case.batches, threads=2)
    one_by_one: Outcomes = []
    for batch in sorted(set(case.batches)):
        own = [g for g in range(num_groups) if case.batches[g] == batch]
        part = compute([case.inputs[g] for g in own], **how)
        one_by_one += part
        # Within a batch neither the order of groups nor that of members matters.
        shuffler = random.Random(seed)
        order = shuffler.sample(range(len(own)), len(own))
        members = [shuffler.sample(range(len(case.inputs[g])), len(case.inputs[g])) for g in own]
        shuffled = compute([[case.inputs[own[g]][m] for m in members[g]] for g in order], **how)
        assert shuffled == [reordered(part[g], members[g]) for g in order]
    assert together == one_by_one


def test_a_neighbour_in_the_batch_does_matter() -> None:
    case, _ = draw("reinforce", 7, 3, batch=True)
    groups = [group for group in case.inputs if any(any(bytes(e.mask.data)) for e in group)]
    assert len(groups) > 1
    how: dict[str, Any] = {"estimator": "reinforce", "parameters": {"cross_batch": "mean"}}
    together = compute(groups, **how)
    apart = compute(groups, **how, batches=list(range(len(groups))))
    assert [computed(o).items for o in together] != [computed(o).items for o in apart]


SHAPED = [name for name in ESTIMATORS if name != "on_policy_distill"]


@pytest.mark.parametrize("estimator", SHAPED)
@LAUNCHES
@given(seed=SEEDS, num_groups=st.integers(1, 6))
def test_running_moments_do_not_depend_on_launches(
    estimator: str, seed: int, num_groups: int
) -> None:
    case, parameters = draw(estimator, seed, num_groups, batch=False, running=True)
    how: dict[str, Any] = {"estimator": estimator, "parameters": parameters}
    moments = RunningMoments()
    together = compute(case.inputs, **how, batches=case.batches, moments=moments)
    cutter, pieces, saved = random.Random(seed), Outcomes(), RunningMoments().to_json()
    start = 0
    while start < num_groups:
        stop = cutter.randint(start + 1, num_groups)
        # Statistics batches stay whole where there are any.
        while estimator == "cpgd" and stop < num_groups and same(case.batches, stop):
            stop += 1
        restored = RunningMoments.from_json(saved)
        own = [b - case.batches[start] for b in case.batches[start:stop]]
        pieces += compute(case.inputs[start:stop], **how, batches=own, moments=restored)
        saved = restored.to_json()
        start = stop
    assert pieces == together
    assert saved == moments.to_json()


def same(batches: Sequence[int], stop: int) -> bool:
    return batches[stop - 1] == batches[stop]


def test_a_group_that_was_counted_is_normalised_and_votes_no_more() -> None:
    case, _ = draw("dr_grpo", 11, 4, batch=False)
    how: dict[str, Any] = {"estimator": "dr_grpo", "parameters": {"running_norm": "mean_std"}}
    moments = RunningMoments()
    compute(case.inputs, **how, moments=moments)
    before = moments.to_json()
    again = compute(case.inputs, **how, moments=moments, counted=[False] * 4)
    assert moments.to_json() == before
    # All are normalised by the moments of everything, so their order is the only order there is.
    backwards = compute(case.inputs[::-1], **how, moments=moments, counted=[False] * 4)
    assert backwards == again[::-1]
    assert {computed(o).details["running_count"] for o in again} == {moments.count}
    half = RunningMoments()
    compute(case.inputs, **how, moments=half, counted=[True, False, True, False])
    kept = RunningMoments()
    compute(case.inputs[::2], **how, moments=kept)
    assert half.to_json() == kept.to_json()


TORCH = [
    "grpo",
    "reinforce_baseline",
    "gigpo",
    "cpgd",
    "reinforce",
    "remax",
    "gae",
    "on_policy_distill",
]


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("estimator", TORCH)
@settings(max_examples=8)
@given(seed=SEEDS, num_groups=st.integers(0, 4))
def test_the_torch_path_agrees(estimator: str, device: str, seed: int, num_groups: int) -> None:
    case, parameters = draw(estimator, seed, max(num_groups, 1), batch=True)
    # An epsilon that no rounding can blow up.
    parameters = without_idle(
        ESTIMATORS[estimator].parameters, parameters | {"advantage_norm_eps": 0.1}
    )
    how: dict[str, Any] = {"estimator": estimator, "parameters": parameters}
    here = compute(case.inputs[:num_groups], **how)
    there = compute(case.inputs[:num_groups], **how, device=device)
    for one, other in zip(here, there, strict=True):
        for mine, theirs in zip(computed(one).items, computed(other).items, strict=True):
            for a, b in ((mine.advantages, theirs.advantages), (mine.returns, theirs.returns)):
                wanted = floats(bytes(a))
                assert floats(bytes(b)) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            flags = ("singleton", "zero_mask", "bootstrapped")
            assert [getattr(mine, f) for f in flags] == [getattr(theirs, f) for f in flags]
