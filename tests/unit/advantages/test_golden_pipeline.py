"""LightRFT's whole pipeline, from rewards to advantages, as its experience maker runs it.

The original uses gamma in the first micro-batch only, and CPGD comes out as 0. So a loop over the
tokens is written here that can do both: as the original does, it agrees with the goldens; as it
should be, `compute` agrees with it. Where it takes statistics of a batch, it also updates running
moments with the whole batch before it uses them; the original does with each micro-batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from .builders import experience
from .goldens import PIPELINE_TOLERANCE, Case, assert_close, cases, chunks, launch, rows

pytestmark = pytest.mark.usefixtures("each_device")

PIPELINE = cases(
    "light_pipeline",
    "FastExperienceMaker._process_experiences + _compute_advantages_and_returns",
    noted=True,
)
ACROSS = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages the original normalises across micro-batches."""
SCALED = ("grpo", "group_norm")
"""Estimators that the original doesn't whiten: they divide by the group's deviation."""
MASKED = ("grpo", "group_norm")
"""Estimators whose groups without variance the original masks, if it samples dynamically."""
MICRO_BATCH = 4


def exceeding(rewards: list[float], masks: list[list[bool]], params: dict[str, Any]) -> list[float]:
    if not params["overlong_buffer"]:
        return rewards
    size, factor = params["overlong_buffer_len"], params["overlong_buffer_penalty_factor"]
    allowed = params["max_new_tokens"] - size
    return [
        reward + min(-(sum(mask) - allowed) / size * factor, 0.0)
        for reward, mask in zip(rewards, masks, strict=True)
    ]


def shaped(estimator: str, group: list[float]) -> list[float]:
    mean, rest = statistics.fmean(group), len(group) - 1
    if estimator == "rloo":
        return [reward - (math.fsum(group) - reward) / rest for reward in group]
    if estimator == "reinforce_baseline":
        return [reward - mean for reward in group]
    if estimator in SCALED:
        deviation = statistics.stdev(group)
        return [(reward - mean) / (deviation + 1e-9) for reward in group]
    return group


def sequence_scores(rewards: list[float]) -> list[float]:
    """CPGD over the whole batch."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def running(
    groups: list[list[float]], params: dict[str, Any], *, whole_batch: bool
) -> list[list[float]]:
    if not params["running_norm"]:
        return groups
    seen = [reward for group in groups for reward in group] if whole_batch else []
    result = []
    for group in groups:
        seen += [] if whole_batch else group
        mean = statistics.fmean(seen) if params["reward_running_norm_minus_mean"] else 0.0
        result.append([(reward - mean) / statistics.stdev(seen) for reward in group])
    return result


def clamped(values: list[float], bound: float) -> list[float]:
    return [min(max(value, -bound), bound) for value in values] if bound else values


def recursion(
    reward: float, mask: list[bool], kl: list[float], values: list[float] | None, p: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one row; a masked token is a step without reward and value."""
    last = max((t for t, valid in enumerate(mask) if valid), default=-1)
    length = len(mask)
    advantages, returns = [0.0] * length, [0.0] * length
    later, next_value = 0.0, 0.0
    for t in reversed(range(length)):
        own = (reward if t == last else 0.0) - p["kl_coef"] * kl[t] if mask[t] else 0.0
        if values is None:
            later = own + p["gamma"] * later
            advantages[t] = returns[t] = later
            continue
        value = values[t] if mask[t] else 0.0
        later = own + p["gamma"] * next_value - value + p["gamma"] * p["lambd"] * later
        next_value = value
        advantages[t], returns[t] = later, later + value
    return advantages, returns


def valid_of(part: list[list[float]], masks: list[list[bool]]) -> list[float]:
    return [
        value
        for row, mask in zip(part, masks, strict=True)
        for value, valid in zip(row, mask, strict=True)
        if valid
    ]


def standardised(part: list[list[float]], mean: float, deviation: float) -> list[list[float]]:
    return [[(value - mean) / deviation for value in row] for row in part]


def finished(
    parts: list[list[list[float]]], masks: list[list[list[bool]]], params: dict[str, Any]
) -> list[list[float]]:
    """Whitening and clip per micro-batch, then normalisation across them."""
    estimator, done = params["estimator"], []
    for part, own in zip(parts, masks, strict=True):
        values = valid_of(part, own)
        whitened = part
        if params["advantages_norm"] and estimator not in SCALED:
            whitened = standardised(part, statistics.fmean(values), statistics.stdev(values) + 1e-8)
        done.append([clamped(row, params["advantage_clip"]) for row in whitened])
    if estimator in ACROSS:
        everything = [v for part, own in zip(done, masks, strict=True) for v in valid_of(part, own)]
        mean = statistics.fmean(everything)
        deviation = math.sqrt(max(statistics.pvariance(everything), 1e-8))
        done = [standardised(part, mean, deviation) for part in done]
    return [row for part in done for row in part]


def loop(
    case: Case, gammas: Sequence[float], *, whole_batch: bool = False
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of all rows, with a gamma for each micro-batch."""
    given, params = case["inputs"], case["params"]
    estimator, masks = params["estimator"], rows(given["action_mask"])
    rewards = exceeding(given["rewards"]["data"], masks, params)
    groups = [shaped(estimator, group) for group in chunks(rewards, MICRO_BATCH)]
    if estimator == "cpgd":
        groups = chunks(sequence_scores(rewards), MICRO_BATCH)
    groups = running(groups, params, whole_batch=whole_batch)
    groups = [clamped(group, params["reward_clip"]) for group in groups]
    parts: list[list[list[float]]] = []
    returns: list[list[float]] = []
    values = rows(given["values"]) if estimator == "gae" else [None] * len(masks)
    for k, (group, gamma) in enumerate(zip(groups, gammas, strict=True)):
        p = {**params, "gamma": 1.0 if estimator in ("reinforce_baseline", "cpgd") else gamma}
        if estimator == "cpgd":
            p["kl_coef"] = 0.0
        computed = [
            recursion(reward, masks[b], rows(given["kl"])[b], values[b], p)
            for b, reward in enumerate(group, start=k * MICRO_BATCH)
        ]
        parts.append([advantages for advantages, _ in computed])
        returns += [row for _, row in computed]
    return finished(parts, chunks(masks, MICRO_BATCH), params), returns


def our_parameters(params: dict[str, Any], gamma: float) -> dict[str, Any]:
    estimator = params["estimator"]
    parameters: dict[str, Any] = {
        "reward_clip": params["reward_clip"],
        "advantage_clip": params["advantage_clip"],
        "advantage_norm_mean": "none",
        "advantage_norm_std": "none",
        "cross_batch": "mean_std" if estimator in ACROSS else "none",
    }
    if estimator != "cpgd":
        parameters |= {
            "gamma": 1.0 if estimator == "reinforce_baseline" else gamma,
            "mask_mode": "count",
            "kl_coef": params["kl_coef"],
        }
    if estimator == "gae":
        parameters["lam"] = params["lambd"]
    if estimator in SCALED:
        parameters["eps"] = 1e-9
    if params["overlong_buffer"]:
        parameters |= {
            "overlong_penalty": params["overlong_buffer_penalty_factor"],
            "overlong_buffer": params["overlong_buffer_len"],
            "max_response_tokens": params["max_new_tokens"],
        }
    if params["running_norm"]:
        minus_mean = params["reward_running_norm_minus_mean"]
        parameters["running_norm"] = "mean_std" if minus_mean else "std"
    if params["advantages_norm"] and estimator not in SCALED:
        # A micro-batch of the original is one group here.
        parameters |= {"advantage_norm_mean": "group", "advantage_norm_std": "group"}
    if params["dynamic_sampling"] and estimator in MASKED:
        parameters["zero_variance"] = "mask"
    return parameters


def ours(
    case: Case, gamma: float, **more: Any
) -> tuple[list[list[float]], list[list[float]], list[Any]]:
    """Advantages, returns and groups of `compute`."""
    given, params = case["inputs"], case["params"]
    masks, kl = rows(given["action_mask"]), rows(given["kl"])
    members = [
        # Of k1 with a reference at 0, the log-probability is the KL.
        experience(reward, mask, values=values, logprobs=divergence, ref_logprobs=[0.0] * len(mask))
        for reward, mask, values, divergence in zip(
            given["rewards"]["data"], masks, rows(given["values"]), kl, strict=True
        )
    ]
    assert params["n_samples_per_prompt"] == params["micro_batch"] == MICRO_BATCH
    results, groups = launch(
        chunks(members, MICRO_BATCH),
        params["estimator"],
        {**our_parameters(params, gamma), **more},
        moments=RunningMoments() if params["running_norm"] else None,
    )
    advantages = [result.advantages for result in results]
    return advantages, [result.returns for result in results], groups


def originals(case: Case) -> list[tuple[str, int, list[float], list[bool]]]:
    """The original's results: what, row, numbers, mask."""
    masks = rows(case["expected"]["action_mask"])
    return [
        (key, b, row, masks[b])
        for key in ("advantages", "returns")
        for b, row in enumerate(rows(case["expected"][key]))
    ]


@pytest.mark.parametrize("case", [c for c in PIPELINE if "cpgd" not in c.id])
def test_the_loop_is_the_original_if_gamma_is_forgotten(case: Case) -> None:
    gamma = case["params"]["gamma"]
    assert gamma < 1.0
    looped = dict(zip(("advantages", "returns"), loop(case, (gamma, 1.0, 1.0)), strict=True))
    for key, b, row, mask in originals(case):
        got = [x if valid else 0.0 for x, valid in zip(looped[key][b], mask, strict=True)]
        assert_close(got, row, mask, PIPELINE_TOLERANCE)


@pytest.mark.parametrize("case", PIPELINE)
@pytest.mark.parametrize("discounted", [True, False])
def test_pipeline_with_gamma_everywhere(case: Case, discounted: bool) -> None:
    gamma = case["params"]["gamma"] if discounted else 1.0
    masks = rows(case["inputs"]["action_mask"])
    advantages, returns, _ = ours(case, gamma)
    of_batch = case["params"]["estimator"] in (*ACROSS, "cpgd")
    wanted_advantages, wanted_returns = loop(case, [gamma] * 3, whole_batch=of_batch)
    for got, row, mask in zip(advantages, wanted_advantages, masks, strict=True):
        assert_close(got, row, mask, PIPELINE_TOLERANCE)
    for got, row, mask in zip(returns, wanted_returns, masks, strict=True):
        assert_close(got, row, mask, PIPELINE_TOLERANCE)


@pytest.mark.parametrize("case", [c for c in PIPELINE if "cpgd" not in c.id])
def test_each_micro_batch_is_the_original_with_the_gamma_it_used(case: Case) -> None:
    params = case["params"]
    first = ours(case, params["gamma"], cross_batch="none")
    others = ours(case, 1.0, cross_batch="none")
    for key, b, row, mask in originals(case):
        # Across micro-batches that used different gammas only the loop can be compared.
        if key == "returns" or params["estimator"] not in ACROSS:
            got = (first if b < MICRO_BATCH else others)[key == "returns"][b]
            kept = [x if valid else 0.0 for x, valid in zip(got, mask, strict=True)]
            assert_close(kept, row, mask, PIPELINE_TOLERANCE)


@pytest.mark.parametrize("case", [c for c in PIPELINE if "cpgd" in c.id])
def test_cpgd_scores_sequences_where_the_original_gives_zero(case: Case) -> None:
    advantages, _, _ = ours(case, 1.0)
    for key, _, row, mask in originals(case):
        assert all(x == 0.0 for x, valid in zip(row, mask, strict=True) if valid), key
    assert any(value != 0.0 for row in advantages for value in row)


@pytest.mark.parametrize(
    "case",
    [c for c in PIPELINE if "dynamic" in c.id and c.values[0]["params"]["estimator"] in MASKED],
)
def test_groups_without_variance_are_masked_as_the_original_does(case: Case) -> None:
    before, after = rows(case["inputs"]["action_mask"]), rows(case["expected"]["action_mask"])
    _, _, groups = ours(case, 1.0)
    masked = [bool(group.details["zero_variance"]) for group in groups]
    assert any(masked)
    assert not all(masked)
    for gone, old, new in zip(
        masked, chunks(before, MICRO_BATCH), chunks(after, MICRO_BATCH), strict=True
    ):
        assert new == ([[False] * len(row) for row in old] if gone else old)


@pytest.mark.parametrize(
    "case", [c for c in PIPELINE if c.values[0]["params"]["reward_clip"] and "cpgd" not in c.id]
)
def test_fraction_of_clipped_rewards(case: Case) -> None:
    _, _, groups = ours(case, 1.0, cross_batch="none")
    fractions = [group.details["reward_clip_fraction"] for group in groups]
    expected = [info["reward_clip_frac"]["data"][0] for info in case["expected"]["info"]]
    assert fractions == pytest.approx(expected, abs=1e-6)
