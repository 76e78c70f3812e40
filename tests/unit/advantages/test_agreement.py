"""The packed computation agrees with a loop over tokens, and with itself in any order."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer_server.advantages import ExperienceInput, GroupResult, compute
from experience_buffer_server.advantages.scan import reverse_scan

from . import reference
from .builders import DTYPES, computed, experience, floats

REWARDS = st.floats(-8, 8, width=32)
MASK_CODES = [code for code in DTYPES if not code.startswith(("F", "BF"))]
GAMMAS = st.sampled_from([0.0, 0.5, 0.97, 1.0])


@dataclass(frozen=True, slots=True)
class Sample:
    """One experience, as lists and as input."""

    reward: float
    mask: list[bool]
    tokens: list[float] | None
    values: list[float]
    bootstrap: float
    given: ExperienceInput


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 33, 67, 131])))
    seed = random.Random(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    mask = [seed.random() < density for _ in range(length)]
    reward = draw(REWARDS)
    garbage = [math.nan, math.inf, -math.inf]

    def numbers() -> list[float]:
        # Eighths are exact in every float dtype; masked slots hold garbage.
        return [seed.randint(-40, 40) / 8 if m else seed.choice(garbage) for m in mask]

    tokens = numbers() if draw(st.booleans()) else None
    values = numbers()
    truncated, extra = draw(st.booleans()), draw(st.booleans())
    bootstrap = seed.randint(-40, 40) / 8
    code = draw(st.sampled_from(MASK_CODES))
    largest = 1 if code == "BOOL" else 100
    given = experience(
        reward,
        [seed.randint(1, largest) if m else 0 for m in mask],
        mask_dtype=code,
        token_level_reward=tokens,
        values=[*values, bootstrap if truncated else math.nan] if extra else values,
        dtype=draw(st.sampled_from(["F16", "BF16", "F32", "F64"])),
        truncated=truncated,
    )
    return Sample(reward, mask, tokens, values, bootstrap if truncated and extra else 0.0, given)


GROUPS = st.lists(st.lists(samples(), max_size=4), max_size=4)


def close(data: bytes, expected: list[float]) -> None:
    assert floats(data) == pytest.approx(expected, rel=3e-6, abs=3e-6)


@settings(max_examples=60, deadline=None)
@given(GROUPS, GAMMAS, GAMMAS, st.sampled_from(["count", "skip"]))
def test_gae_agrees(groups: list[list[Sample]], gamma: float, lam: float, mode: str) -> None:
    outcomes = compute(
        [[s.given for s in group] for group in groups],
        estimator="gae",
        parameters={"gamma": gamma, "lam": lam, "mask_mode": mode},
    )
    for group, outcome in zip(groups, outcomes, strict=True):
        for sample, item in zip(group, computed(outcome).items, strict=True):
            advantages, returns = reference.gae(
                sample.tokens or reference.place(sample.reward, sample.mask),
                sample.values,
                sample.mask,
                gamma=gamma,
                lam=lam,
                mode=mode,
                bootstrap=sample.bootstrap,
            )
            close(item.advantages, advantages)
            close(item.returns, returns)
            assert item.zero_mask == (not any(sample.mask))


@settings(max_examples=60, deadline=None)
@given(GROUPS, GAMMAS, st.sampled_from(["count", "skip"]))
def test_reinforce_agrees(groups: list[list[Sample]], gamma: float, mode: str) -> None:
    outcomes = compute(
        [[s.given for s in group] for group in groups],
        estimator="reinforce",
        parameters={"gamma": gamma, "mask_mode": mode},
    )
    for group, outcome in zip(groups, outcomes, strict=True):
        for sample, item in zip(group, computed(outcome).items, strict=True):
            rewards = sample.tokens or reference.place(sample.reward, sample.mask)
            close(item.advantages, reference.returns(rewards, sample.mask, gamma=gamma, mode=mode))
            assert item.returns == item.advantages


@settings(max_examples=60, deadline=None)
@given(GROUPS, GAMMAS, st.sampled_from(["count", "skip"]))
def test_rloo_agrees(groups: list[list[Sample]], gamma: float, mode: str) -> None:
    outcomes = compute(
        [[s.given for s in group] for group in groups],
        estimator="rloo",
        parameters={"gamma": gamma, "mask_mode": mode},
    )
    for group, outcome in zip(groups, outcomes, strict=True):
        scores = reference.rloo([s.reward for s in group]) if group else []
        for sample, score, item in zip(group, scores, computed(outcome).items, strict=True):
            rewards = reference.place(score, sample.mask)
            close(item.advantages, reference.returns(rewards, sample.mask, gamma=gamma, mode=mode))
            assert item.singleton == (len(group) == 1)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_grpo_agrees(groups: list[list[Sample]]) -> None:
    outcomes = compute(
        [[s.given for s in group] for group in groups], estimator="grpo", parameters={}
    )
    for group, outcome in zip(groups, outcomes, strict=True):
        scores = reference.grpo([s.reward for s in group], 1e-6) if group else []
        for sample, score, item in zip(group, scores, computed(outcome).items, strict=True):
            close(item.advantages, [score if m else 0.0 for m in sample.mask])
            assert item.singleton == (len(group) == 1)


@settings(max_examples=40, deadline=None)
@given(
    GROUPS, st.randoms(use_true_random=False), st.sampled_from(["grpo", "rloo", "reinforce", "gae"])
)
def test_order_and_neighbours_change_no_bit(
    groups: list[list[Sample]], shuffler: random.Random, estimator: str
) -> None:
    parameters: dict[str, float | bool | str] = (
        {} if estimator == "grpo" else {"gamma": 0.97, "mask_mode": "count"}
    )
    inputs = [[s.given for s in group] for group in groups]
    together = compute(inputs, estimator=estimator, parameters=parameters)
    alone = [compute([group], estimator=estimator, parameters=parameters)[0] for group in inputs]
    assert together == alone

    order = list(range(len(inputs)))
    shuffler.shuffle(order)
    members = [shuffler.sample(range(len(g)), len(g)) for g in inputs]
    shuffled = compute(
        [[inputs[g][m] for m in members[g]] for g in order],
        estimator=estimator,
        parameters=parameters,
    )
    for g, outcome in zip(order, shuffled, strict=True):
        original = computed(together[g])
        expected = tuple(original.items[m] for m in members[g])
        assert outcome == GroupResult(items=expected, details=original.details)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 200, 1030]), max_size=6),
    st.integers(0, 2**32),
)
def test_scan_agrees_with_a_loop_and_with_each_sequence_alone(
    lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    terms = torch.randn(total, dtype=torch.float64, generator=generator)
    factors = torch.rand(total, dtype=torch.float64, generator=generator)
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        factors[max(start, stop - 1) : stop] = 0.0
    solved = reverse_scan(terms, factors_N=factors, offsets=offsets)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        later, expected = 0.0, []
        for term, factor in zip(
            reversed(terms[start:stop].tolist()),
            reversed(factors[start:stop].tolist()),
            strict=True,
        ):
            later = term + factor * later
            expected.append(later)
        part = solved[start:stop]
        assert part.tolist() == pytest.approx(expected[::-1], rel=1e-11, abs=1e-11)
        own = reverse_scan(
            terms[start:stop],
            factors_N=factors[start:stop],
            offsets=torch.tensor([0, stop - start]),
        )
        assert own.numpy().tobytes() == part.numpy().tobytes()


def test_a_neighbour_does_not_decide_the_sign_of_a_zero() -> None:
    # The first sequence fills its block, so its last token meets its neighbour's negative head.
    terms = torch.tensor([-0.0] * 32 + [-1.0], dtype=torch.float64)
    solved = reverse_scan(
        terms, factors_N=torch.zeros_like(terms), offsets=torch.tensor([0, 32, 33])
    )
    assert solved[:32].numpy().tobytes() == bytes(32 * 8)
