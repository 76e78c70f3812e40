"""Stages over tokens agree with the original implementations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .builders import experience
from .goldens import (
    TOLERANCE,
    Case,
    Rows,
    assert_close,
    assert_rows,
    cases,
    dense,
    dtype_of,
    exact,
    launch,
    masks_of,
    only,
    rows,
    token_results,
)

pytestmark = pytest.mark.usefixtures("each_device")


def check_tokens(
    case: Case,
    estimator: str,
    rewards_key: str,
    *,
    more: dict[str, Any] | None = None,
) -> None:
    """Cases of LightRFT, where rewards are per token and a masked token is a step."""
    given, params = case["inputs"], case["params"]
    rewards, dtype = rows(given[rewards_key]), dtype_of(given[rewards_key])
    masks = masks_of(given, rewards)
    values = rows(given["values"]) if estimator == "gae" else None
    inputs = dense(masks, rewards, values, dtype=dtype)
    parameters = {"gamma": params["gamma"], "mask_mode": "count", **(more or {})}
    if estimator == "gae":
        parameters["lam"] = params["lambd"]
    results = token_results([inputs], estimator, parameters, dtype)
    keys = [key for key in ("advantages", "returns") if key in case["expected"]]
    assert_rows(results, case["expected"], masks, TOLERANCE[dtype], keys=keys)


@pytest.mark.parametrize(
    "case", cases("light_gae", "NaiveExperienceMaker.get_advantages_and_returns")
)
def test_gae(case: Case) -> None:
    check_tokens(case, "gae", "rewards")


def test_gae_keeps_garbage_in_padding_out() -> None:
    case = only("light_gae", "NaiveExperienceMaker.get_advantages_and_returns", noted=True)
    given, params = case["inputs"], case["params"]
    values, masks, rewards = (
        rows(given["values"]),
        rows(given["action_mask"]),
        rows(given["rewards"]),
    )
    assert math.isnan(values[1][3])
    assert not masks[1][3]
    parameters = {"gamma": params["gamma"], "lam": params["lambd"], "mask_mode": "count"}

    def results(values: Rows) -> list[Any]:
        inputs = [
            experience(None, mask, token_level_reward=reward, values=value, mask_dtype="I64")
            for mask, reward, value in zip(masks, rewards, values, strict=True)
        ]
        return launch([inputs], "gae", parameters)[0]

    dirty = results(values)
    assert_close(dirty[0].advantages, rows(case["expected"]["advantages"])[0], masks[0], 3e-5)
    clean = [[0.0 if math.isnan(value) else value for value in row] for row in values]
    assert dirty == results(clean)
    assert all(math.isfinite(value) for value in (*dirty[1].advantages, *dirty[1].returns))


@pytest.mark.parametrize("case", cases("light_cumulative_returns", "get_cumulative_returns"))
def test_returns(case: Case) -> None:
    check_tokens(case, "reinforce", "rewards")


CALCULATORS = cases("light_calculators", "AdvantageCalculator.compute")


def calculator(case: Any) -> str:
    return str(case.values[0]["params"]["estimator"])


@pytest.mark.parametrize("case", [c for c in CALCULATORS if calculator(c) != "cpgd"])
def test_calculators_whiten_and_clip(case: Case) -> None:
    params = case["params"]
    name = params["estimator"]
    more: dict[str, Any] = {"advantage_clip": params["advantage_clip"]}
    # The original leaves scores that were divided by their group's deviation as they are.
    if params["advantages_norm"] and name != "group_norm":
        more |= {
            "advantage_norm_mean": "batch",
            "advantage_norm_std": "batch",
            "advantage_norm_eps": 1e-9 if name == "gae" else 1e-8,
        }
    if name == "reinforce_baseline":
        more["gamma"] = 1.0
    check_tokens(case, "gae" if name == "gae" else "reinforce", "final_reward", more=more)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CALCULATORS
        if calculator(c) in ("reinforce", "rloo", "group_norm")
        and c.values[0]["params"]["advantage_clip"]
        and not c.values[0]["params"]["advantages_norm"]
        and "right" in c.values[0]["name"]
    ],
)
def test_clip_fraction_is_taken_over_valid_tokens(case: Case) -> None:
    # The original divides by all slots; padding on the right is zero before it is whitened.
    given, params = case["inputs"], case["params"]
    rewards, masks = rows(given["final_reward"]), rows(given["action_mask"])
    inputs = dense(masks, rewards, dtype="float64")
    parameters = {
        "gamma": params["gamma"],
        "mask_mode": "count",
        "advantage_clip": params["advantage_clip"],
    }
    _, (result,) = launch([inputs], "reinforce", parameters)
    slots, valid = sum(map(len, masks)), sum(map(sum, masks))
    expected = case["expected"]["info"]["advantage_clip_frac"]["data"][0] * slots / valid
    assert result.details["advantage_clip_fraction"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", [c for c in CALCULATORS if calculator(c) == "cpgd"])
def test_cpgd_scores_each_sequence_and_neither_whitens_nor_clips(case: Case) -> None:
    given = case["inputs"]
    masks, rewards = rows(given["action_mask"]), rows(given["info_reward"])
    dtype = dtype_of(given["info_reward"])
    # The original sums what it gets per sequence, masked or not.
    inputs = dense([[True] * len(row) for row in rewards], rewards, dtype=dtype)
    results = token_results([inputs], "cpgd", {"weight": "std"}, dtype)
    for key in ("advantages", "returns"):
        expected = rows(case["expected"][key])
        for result, row, mask in zip(results, expected, masks, strict=True):
            got = [x if valid else 0.0 for x, valid in zip(getattr(result, key), mask, strict=True)]
            assert_close(got, row, mask, TOLERANCE[dtype])


def test_gae_of_packed_sequences_clips() -> None:
    given = next(
        c.values[0]
        for c in cases("light_calculators", "GAECalculator.get_advantages_and_returns")
        if c.values[0]["name"] == "gae-packed-clip"
    )
    check_tokens(
        given, "gae", "rewards", more={"advantage_clip": given["params"]["advantage_clip"]}
    )


def test_packed_sequences_can_be_whitened() -> None:
    raising, clipping = (
        next(c.values[0] for c in packed if c.values[0]["name"] == name)
        for packed in [cases("light_calculators", "GAECalculator.get_advantages_and_returns")]
        for name in ("gae-packed-norm-raises", "gae-packed-clip")
    )
    assert "TypeError" in raising["expected"]["error"]
    rewards, values = rows(clipping["inputs"]["rewards"]), rows(clipping["inputs"]["values"])
    inputs = dense([[True] * len(reward) for reward in rewards], rewards, values)
    parameters = {"advantage_norm_mean": "batch", "advantage_norm_std": "batch"}
    results = exact([inputs], "gae", parameters)
    whitened = np.concatenate([result.advantages for result in results])
    assert whitened.mean() == pytest.approx(0.0, abs=1e-12)
    assert whitened.std(ddof=1) == pytest.approx(1.0, abs=1e-7)


def test_whitening_without_valid_tokens_gives_zeros_instead_of_nan() -> None:
    case = only("light_calculators", "BaseREINFORCECalculator.compute", noted=True)
    rewards, masks = rows(case["inputs"]["final_reward"]), rows(case["inputs"]["action_mask"])
    assert all(math.isnan(value) for value in case["expected"]["advantages"]["data"])
    inputs = dense(masks, rewards)
    parameters = {"advantage_norm_mean": "batch", "advantage_norm_std": "batch"}
    results, (group,) = launch([inputs], "reinforce", parameters)
    for result in results:
        assert result.advantages == result.returns == [0.0] * 3
    assert all(item.zero_mask for item in group.items)


CROSS_BATCH = cases("light_cross_batch", "normalize_advantages_cross_batch")
ACROSS = ("gae", "reinforce", "reinforce_baseline")


@pytest.mark.parametrize("case", [c for c in CROSS_BATCH if c.id != "allmasked"])
def test_normalisation_across_micro_batches(case: Case) -> None:
    given, params = case["inputs"], case["params"]
    masks, advantages = rows(given["action_mask"]), rows(given["advantages"])
    dtype = dtype_of(given["advantages"])
    groups = [
        dense(rows(mask), rows(part), dtype=dtype)
        for mask, part in zip(given["action_mask"], given["advantages"], strict=True)
    ]
    how = "mean" if params["no_advantage_std_norm"] else "mean_std"
    cross_batch = how if params["advantage_estimator"] in ACROSS else "none"
    # Without a discount of later rewards, advantages are what was given.
    parameters = {"gamma": 0.0, "cross_batch": cross_batch}
    results = token_results(groups, "reinforce", parameters, dtype)
    assert len(advantages) == len(results)
    # The original sums float64 advantages in float32.
    tolerance = TOLERANCE[dtype if cross_batch == "none" else "float32"]
    assert_rows(results, case["expected"], masks, tolerance, keys=["advantages"])


def test_normalisation_across_nothing_gives_zeros_instead_of_nan() -> None:
    (case,) = (c.values[0] for c in CROSS_BATCH if c.id == "allmasked")
    given = case["inputs"]
    assert any(math.isnan(v) for row in rows(case["expected"]["advantages"]) for v in row)
    inputs = dense(rows(given["action_mask"]), rows(given["advantages"]))
    results, _ = launch([inputs], "reinforce", {"gamma": 0.0, "cross_batch": "mean_std"})
    assert all(value == 0.0 for result in results for value in result.advantages)
