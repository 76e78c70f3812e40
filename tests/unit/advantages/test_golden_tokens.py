"""Recursions over tokens agree with the original implementations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from experience_buffer_server.advantages import ExperienceInput

from . import reference
from .builders import experience
from .goldens import Case, assert_close, cases, check_tokens, rows, token_results


@pytest.mark.parametrize(
    "case", cases("light_gae", "NaiveExperienceMaker.get_advantages_and_returns")
)
def test_gae(case: Case) -> None:
    check_tokens(case, "gae")


@pytest.mark.parametrize("case", cases("light_cumulative_returns", "get_cumulative_returns"))
def test_returns(case: Case) -> None:
    check_tokens(case, "reinforce")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases("light_calculators", "AdvantageCalculator.compute")
        if case.values[0]["params"]["estimator"] in ("gae", "reinforce", "rloo", "group_norm")
        and not case.values[0]["params"]["advantages_norm"]
        and not case.values[0]["params"]["advantage_clip"]
    ],
)
def test_token_stage_of_each_calculator(case: Case) -> None:
    # Whitening and clipping come after these estimators; those cases aren't theirs.
    estimator = "gae" if case["params"]["estimator"] == "gae" else "reinforce"
    check_tokens(case, estimator, "final_reward")


def test_gae_keeps_garbage_in_padding_out() -> None:
    (parameter,) = cases("light_gae", "NaiveExperienceMaker.get_advantages_and_returns", noted=True)
    case = parameter.values[0]
    given, params = case["inputs"], case["params"]
    values, masks = rows(given["values"]), rows(given["action_mask"])
    assert math.isnan(values[1][3])
    assert not masks[1][3]
    inputs = [
        experience(None, mask, token_level_reward=reward, values=value, mask_dtype="I64")
        for mask, reward, value in zip(masks, rows(given["rewards"]), values, strict=True)
    ]
    parameters = {"gamma": params["gamma"], "lam": params["lambd"], "mask_mode": "count"}
    results = token_results(inputs, "gae", parameters, "float32")
    assert_close(results[0][0], rows(case["expected"]["advantages"])[0], masks[0], 3e-5)
    expected = reference.gae(
        rows(given["rewards"])[1],
        values[1],
        masks[1],
        gamma=params["gamma"],
        lam=params["lambd"],
        mode="count",
    )
    assert_close(results[1][0], expected[0], masks[1], 3e-5)
    assert_close(results[1][1], expected[1], masks[1], 3e-5)


@pytest.mark.parametrize(
    "case", cases("areal_legacy_gae", "realhf pygae1d_nolp_misalign", noted=True)
)
def test_packed_gae_with_bootstrap_leaves_its_input_alone(case: Case) -> None:
    given, params = case["inputs"], case["params"]
    bounds = given["cu_seqlens"]["data"]
    inputs, expected = [], []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        # Each sequence has one value more than rewards.
        values = given["values"]["data"][start + index : stop + index + 1]
        inputs.append(
            experience(
                None,
                [True] * (stop - start),
                token_level_reward=given["rewards"]["data"][start:stop],
                values=values,
                truncated=given["bootstrap"]["data"][index],
            )
        )
        expected.append(
            tuple(case["expected"][key]["data"][start:stop] for key in ("advantages", "returns"))
        )
    before = [bytes(item.values.data) for item in inputs if item.values is not None]
    parameters = {"gamma": params["gamma"], "lam": params["lam"], "mask_mode": "skip"}
    results = token_results(inputs, "gae", parameters, "float32")
    for result, want in zip(results, expected, strict=True):
        assert result[0] == pytest.approx(want[0], rel=3e-5, abs=3e-5)
        assert result[1] == pytest.approx(want[1], rel=3e-5, abs=3e-5)
    assert before == [item.values.data for item in inputs if item.values is not None]


def areal_rows(case: Case, *, padded_width: int) -> Iterator[tuple[ExperienceInput, list[float]]]:
    """Rows of AReaL's pipeline after its KL stage, and their expected advantages.

    The last column only serves as bootstrap value, of rows that fill the padded width.
    """
    width = case["inputs"]["input_ids"]["shape"][1]
    masks, totals = rows(case["expected"]["loss_mask"]), rows(case["expected"]["tot_rewards"])
    values = rows(case["inputs"]["values"]) if "values" in case["inputs"] else None
    filled = [sum(row) == padded_width for row in rows(case["inputs"]["attention_mask"])]
    for b, (mask, total) in enumerate(zip(masks, totals, strict=True)):
        yield (
            experience(
                None,
                mask[: width - 1],
                mask_dtype="I32",
                token_level_reward=total[: width - 1],
                values=values[b] if values else [0.0] * width,
                truncated=filled[b],
            ),
            rows(case["expected"]["advantages"])[b][: width - 1],
        )


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in cases("areal_advantages", "PPOActor._compute_advantages")
        if case.values[0]["params"]["adv_norm"] is None
    ],
)
def test_gae_that_skips_masked_tokens(case: Case) -> None:
    params = case["params"]
    width = case["inputs"]["input_ids"]["shape"][1]
    inputs, expected = zip(*areal_rows(case, padded_width=width), strict=True)
    parameters = {
        "gamma": params["discount"],
        "lam": params["gae_lambda"],
        "mask_mode": "skip",
    }
    results = token_results(list(inputs), "gae", parameters, "float32")
    masks = [row[: width - 1] for row in rows(case["expected"]["loss_mask"])]
    for result, row, mask in zip(results, expected, masks, strict=True):
        assert_close(result[0], row, mask, 2e-3)


def test_padding_does_not_make_an_experience_truncated() -> None:
    (parameter,) = cases("areal_advantages", "PPOActor._compute_advantages", noted=True)
    case = parameter.values[0]
    width = case["inputs"]["input_ids"]["shape"][1]
    filled = [sum(row) == width for row in rows(case["inputs"]["attention_mask"])]
    parameters = {
        "gamma": case["params"]["discount"],
        "lam": case["params"]["gae_lambda"],
        "mask_mode": "skip",
    }
    results = []
    for expected, padding in (
        (case["expected"]["unpadded"], 0),
        (case["expected"]["padded_by_3"], 3),
    ):
        inputs = [
            experience(
                None,
                mask[:width] + [False] * padding,
                token_level_reward=total[:width] + [math.nan] * padding,
                values=value + [math.nan] * padding,
            )
            for mask, total, value in zip(
                rows(expected["loss_mask"]),
                rows(expected["tot_rewards"]),
                rows(case["inputs"]["values"]),
                strict=True,
            )
        ]
        results.append(
            [row[:width] for row, _ in token_results(inputs, "gae", parameters, "float32")]
        )
        masks = rows(expected["loss_mask"])
        for result, row, mask, full in zip(
            results[-1], rows(expected["advantages"]), masks, filled, strict=True
        ):
            # The original bootstraps a row that fills the width, until it is padded.
            if padding or not full:
                assert_close(result, row[:width], mask[:width], 2e-3)
    assert results[0] == results[1]
    assert any(filled)
