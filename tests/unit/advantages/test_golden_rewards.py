"""KL and rewards of tokens agree with the original implementations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from experience_buffer_server.advantages import ExperienceInput

from .builders import experience
from .goldens import (
    CODES,
    TOLERANCE,
    Case,
    Rows,
    assert_close,
    assert_rows,
    cases,
    dtype_of,
    launch,
    masks_of,
    only,
    rows,
)

pytestmark = pytest.mark.usefixtures("each_device")


def kl_inputs(given: dict[str, Any], dtype: str) -> tuple[list[ExperienceInput], Rows]:
    logprobs, references = rows(given["log_probs"]), rows(given["log_probs_base"])
    masks = masks_of(given, logprobs)
    inputs = [
        experience(0.0, mask, logprobs=one, ref_logprobs=other, dtype=CODES[dtype])
        for mask, one, other in zip(masks, logprobs, references, strict=True)
    ]
    return inputs, masks


def divergences(given: dict[str, Any], estimator: str, clip: float = 0.0) -> tuple[Rows, Rows]:
    """KL per token, and the masks: without discounted rewards, what is left is minus the KL."""
    inputs, masks = kl_inputs(given, dtype_of(given["log_probs"]))
    parameters = {"gamma": 0.0, "kl_coef": 1.0, "kl_estimator": estimator, "kl_clip": clip}
    results, _ = launch([inputs], "reinforce", parameters)
    return [[-value for value in result.returns] for result in results], masks


@pytest.mark.parametrize("case", cases("light_kl", "compute_approx_kl (+ masked_mean dim=-1)"))
def test_kl(case: Case) -> None:
    expected = case["expected"]
    kl, masks = divergences(case["inputs"], case["params"]["kl_estimator"])
    for got, row, mask in zip(kl, rows(expected["kl"]), masks, strict=True):
        assert_close(got, row, mask, TOLERANCE["float32"])
    means = [math.fsum(row) / max(sum(mask), 1) for row, mask in zip(kl, masks, strict=True)]
    assert means == pytest.approx(expected["masked_mean"]["data"], rel=3e-5, abs=3e-5)


def test_kl_is_clamped_only_where_it_is_configured() -> None:
    case = only("light_kl", "compute_approx_kl", noted=True)
    (kl,), (mask,) = divergences(case["inputs"], "k1")
    assert_close(kl, case["expected"]["kl"]["data"], mask, 3e-5)
    (clamped,), _ = divergences(case["inputs"], "k1", clip=10.0)
    assert clamped == [-10.0, 10.0, -10.0, 10.0]


def test_k3_is_computed_where_the_original_cannot_be_called() -> None:
    case = only(
        "light_kl",
        "NaiveExperienceMaker.make_experience -> compute_approx_kl(use_kl_estimator_k3=...)",
    )
    assert "TypeError" in case["expected"]["error"]
    tensor = {"dtype": "float32", "shape": [1, 2]}
    given = {
        "log_probs": {**tensor, "data": [-1.0, -2.0]},
        "log_probs_base": {**tensor, "data": [-2.0, -2.0]},
    }
    (kl,), _ = divergences(given, "k3")
    assert kl == pytest.approx([math.exp(-1.0), 0.0], rel=3e-5)


@pytest.mark.parametrize("case", cases("areal_norm", "KLEstimator"))
def test_kl_of_areal(case: Case) -> None:
    estimator = case["name"].removeprefix("kl-")
    for key, clip in (("clamped", 10.0), ("raw", 0.0)):
        (kl,), (mask,) = divergences(case["inputs"], estimator, clip)
        assert_close(kl, case["expected"][key]["data"], mask, 3e-5)


REWARDS = cases("light_compute_reward", "compute_reward")


@pytest.mark.parametrize("case", REWARDS)
def test_rewards_of_tokens(case: Case) -> None:
    given, params = case["inputs"], case["params"]
    kl, masks, dtype = rows(given["kl"]), rows(given["action_mask"]), dtype_of(given["kl"])
    # A negative coefficient counts as none in the original; here it is refused.
    coefficient = max(params["kl_coef"], 0.0)
    bounds = params["reward_clip_range"]
    inputs = [
        # Of k1 with a reference at 0, the log-probability is the KL.
        experience(reward, mask, logprobs=row, ref_logprobs=[0.0] * len(row), dtype=CODES[dtype])
        for reward, mask, row in zip(given["r"]["data"], masks, kl, strict=True)
    ]
    parameters: dict[str, Any] = {"gamma": 0.0, "kl_coef": coefficient}
    if bounds:
        parameters["reward_clip"] = bounds[1]
        assert bounds[0] == -bounds[1]
    results, _ = launch([inputs], "reinforce", parameters)
    # Scalar rewards and the KL are float32 here.
    expected = {"returns": case["expected"]["reward"]}
    assert_rows(results, expected, masks, TOLERANCE["float32"], keys=["returns"])


def test_each_packed_sequence_keeps_its_own_reward() -> None:
    case = only("light_compute_reward", "compute_reward", noted=True)
    given, coefficient = case["inputs"], case["params"]["kl_coef"]
    bounds = [0, *itertools.accumulate(given["num_actions"])]
    kl = [given["kl"]["data"][start:stop] for start, stop in itertools.pairwise(bounds)]
    inputs = [
        experience(reward, [True] * len(row), logprobs=row, ref_logprobs=[0.0] * len(row))
        for reward, row in zip(given["r"]["data"], kl, strict=True)
    ]
    results, _ = launch([inputs], "reinforce", {"gamma": 0.0, "kl_coef": coefficient})
    for result, reward, row in zip(results, given["r"]["data"], kl, strict=True):
        expected = [-coefficient * x for x in row]
        expected[-1] += reward
        assert result.returns == pytest.approx(expected, rel=3e-5, abs=3e-5)
