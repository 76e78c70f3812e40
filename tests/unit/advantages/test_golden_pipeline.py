"""LightRFT's whole pipeline, from rewards to advantages, as its experience maker runs it.

The original uses gamma in the first micro-batch only, so that each micro-batch is compared with what
`compute` makes of it by the gamma it used, normalised across them afterwards; and CPGD comes out as 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
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


def across(parts: list[list[float]], masks: list[list[bool]]) -> list[list[float]]:
    """Advantages of all micro-batches, normalised over their valid tokens."""
    valid = [
        x for row, mask in zip(parts, masks, strict=True) for x in itertools.compress(row, mask)
    ]
    mean = statistics.fmean(valid)
    deviation = math.sqrt(max(statistics.pvariance(valid), 1e-8))
    return [[(x - mean) / deviation for x in row] for row in parts]


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
def test_each_micro_batch_is_the_original_with_the_gamma_it_used(case: Case) -> None:
    gamma, masks = case["params"]["gamma"], rows(case["inputs"]["action_mask"])
    assert gamma < 1.0
    first = ours(case, gamma, cross_batch="none")
    others = ours(case, 1.0, cross_batch="none")
    advantages, returns = (
        [*mine[:MICRO_BATCH], *theirs[MICRO_BATCH:]]
        for mine, theirs in zip(first[:2], others[:2], strict=True)
    )
    if case["params"]["estimator"] in ACROSS:
        advantages = across(advantages, masks)
    for key, b, row, mask in originals(case):
        got = (advantages if key == "advantages" else returns)[b]
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
