"""Normalisation, packed rewards and advantages of AReaL, given to `compute` as it expects them.

AReaL keeps whole sequences: what belongs to the token at t + 1 is moved to t, the reward goes on the
last position but one, and a row that fills the padded width counts as truncated.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from experience_buffer_server.advantages import ExperienceInput

from .builders import experience
from .goldens import (
    Case,
    Computed,
    assert_close,
    assert_rows,
    cases,
    chunks,
    dense,
    launch,
    only,
    rows,
)

pytestmark = pytest.mark.usefixtures("each_device")

ADVANTAGES = cases("areal_advantages", "PPOActor._compute_advantages")


def normalisation(params: dict[str, Any] | None, prefix: str) -> dict[str, Any]:
    """Parameters of a reward or advantage normalisation."""
    if params is None or not (params["mean_level"] or params["std_level"]):
        return {}
    return {
        f"{prefix}_mean": params["mean_level"] or "none",
        f"{prefix}_std": params["std_level"] or "none",
        f"{prefix}_leave_one_out": params["mean_leave1out"],
        f"{prefix}_ddof": int(params["std_unbiased"]),
        f"{prefix}_eps": params["eps"],
    }


NORMALISATIONS = [c for c in cases("areal_norm", "Normalization.__call__") if c.id != "all-masked"]


@pytest.mark.parametrize("case", NORMALISATIONS)
def test_rewards_are_normalised(case: Case) -> None:
    rewards = case["inputs"]["x1"]["data"]
    groups = chunks([experience(r, [True]) for r in rewards], case["params"]["group_size"])
    results, _ = launch(groups, "reinforce", normalisation(case["params"], "reward_norm"))
    got = [result.advantages[0] for result in results]
    assert got == pytest.approx(case["expected"]["x1"]["data"], rel=3e-5, abs=3e-5)


@pytest.mark.parametrize("case", NORMALISATIONS)
def test_advantages_are_normalised(case: Case) -> None:
    given = case["inputs"]
    masks = rows(given["mask"])
    groups = chunks(dense(masks, rows(given["x2"])), case["params"]["group_size"])
    parameters = {"gamma": 0.0, **normalisation(case["params"], "advantage_norm")}
    results, _ = launch(groups, "reinforce", parameters)
    expected = {"advantages": case["expected"]["x2"]}
    assert_rows(results, expected, masks, 3e-5, keys=["advantages"])


def test_a_member_left_over_is_a_group_of_its_own() -> None:
    case = only("areal_norm", "Normalization.__call__", noted=True)
    params = {"mean_leave1out": False, "std_unbiased": True, **case["params"]}
    rewards, expected = case["inputs"]["x"]["data"], case["expected"]["out"]["data"]
    groups = chunks([experience(r, [True]) for r in rewards], params["group_size"])
    results, _ = launch(groups, "reinforce", normalisation(params, "reward_norm"))
    got = [result.advantages[0] for result in results]
    assert got[:4] == pytest.approx(expected[:4], rel=3e-5, abs=3e-5)
    assert expected[4] > 1e5
    assert got[4] == 0.0


def test_without_valid_tokens_nothing_is_left() -> None:
    (case,) = (
        c.values[0] for c in cases("areal_norm", "Normalization.__call__") if c.id == "all-masked"
    )
    given = case["inputs"]
    member = experience(None, given["mask"]["data"], token_level_reward=given["x"]["data"])
    parameters = {"gamma": 0.0, "advantage_norm_mean": "batch", "advantage_norm_std": "batch"}
    (result,), (group,) = launch([[member]], "reinforce", parameters)
    # The original returns what it got: nobody reads masked slots.
    assert result.advantages == [0.0] * 5
    assert group.items[0].zero_mask


def test_masked_normalisation() -> None:
    case = only("areal_norm", "areal masked_normalization / realhf masked_normalization")
    given, params = case["inputs"], case["params"]
    values = rows(given["x"])
    parameters = {
        "gamma": 0.0,
        "advantage_norm_mean": "batch",
        "advantage_norm_std": "batch",
        "advantage_norm_ddof": int(params["unbiased"]),
        "advantage_norm_eps": params["eps"],
    }
    everywhere = [[True] * len(row) for row in values]
    for key, masks in (
        ("areal", rows(given["mask"])), ("realhf", rows(given["mask"])), ("nomask", everywhere),
    ):  # fmt: skip
        results, _ = launch([dense(masks, values)], "reinforce", parameters)
        expected = {"advantages": case["expected"][key]}
        assert_rows(results, expected, masks, 3e-5, keys=["advantages"])


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
            Computed(*(case["expected"][k]["data"][start:stop] for k in ("advantages", "returns")))
        )
    before = [bytes(item.values.data) for item in inputs if item.values is not None]
    parameters = {"gamma": params["gamma"], "lam": params["lam"], "mask_mode": "skip"}
    results, _ = launch([inputs], "gae", parameters)
    for result, want in zip(results, expected, strict=True):
        assert result.advantages == pytest.approx(want.advantages, rel=3e-5, abs=3e-5)
        assert result.returns == pytest.approx(want.returns, rel=3e-5, abs=3e-5)
    assert before == [item.values.data for item in inputs if item.values is not None]


def packed_rewards(case: Case, inputs: list[ExperienceInput], **more: Any) -> list[float]:
    """Rewards of tokens, one sequence after another."""
    parameters = {"gamma": 0.0, "kl_coef": case["params"]["kl_ctl"], **more}
    results, _ = launch([inputs], "reinforce", parameters)
    return [reward for result in results for reward in result.returns]


def packed_logprobs(case: Case) -> list[dict[str, Any]]:
    given = case["inputs"]
    return [
        {
            "logprobs": given["log_probs"]["data"][start:stop],
            "ref_logprobs": given["ref_log_probs"]["data"][start:stop],
        }
        for start, stop in itertools.pairwise(given["short1cu_seqlens"]["data"])
    ]


def test_packed_rewards() -> None:
    case = only("areal_legacy_gae", "realhf get_packed_rewards")
    given = case["inputs"]
    scores = zip(given["reward_score"]["data"], given["seq_no_eos_mask"]["data"], strict=True)
    inputs = [
        # The original takes the reward from a sequence that didn't end.
        experience(0.0 if endless else score, [True] * len(logprobs["logprobs"]), **logprobs)
        for (score, endless), logprobs in zip(scores, packed_logprobs(case), strict=True)
    ]
    got = packed_rewards(case, inputs, reward_clip=case["params"]["clip_reward_value"])
    assert got == pytest.approx(case["expected"]["tot_rewards"]["data"], rel=3e-5, abs=3e-5)
    unrewarded = packed_rewards(
        case, [experience(0.0, [True] * len(lp["logprobs"]), **lp) for lp in packed_logprobs(case)]
    )
    assert unrewarded == pytest.approx(case["expected"]["kl_rewards"]["data"], rel=3e-5, abs=3e-5)


@pytest.mark.parametrize("case", cases("areal_legacy_gae", "realhf get_packed_reward_dense"))
def test_packed_dense_rewards(case: Case) -> None:
    given, params = case["inputs"], case["params"]
    bound = params["clip_reward_value"]
    clamped = [min(max(x, -bound), bound) for x in given["dense_reward_score"]["data"]]
    inputs = []
    bounds = itertools.pairwise(given["short1cu_seqlens"]["data"])
    for index, ((start, stop), logprobs) in enumerate(
        zip(bounds, packed_logprobs(case), strict=True)
    ):
        # Each sequence has one score more than tokens.
        scores = clamped[start + index : stop + index + 1]
        rewards = (
            [later - earlier for earlier, later in itertools.pairwise(scores)]
            if params["reward_delta"]
            else scores[1:]
        )
        inputs.append(
            experience(None, [True] * len(rewards), token_level_reward=rewards, **logprobs)
        )
    got = packed_rewards(case, inputs)
    assert got == pytest.approx(case["expected"]["tot_rewards"]["data"], rel=3e-5, abs=3e-5)


def areal_parameters(params: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "gamma": params["discount"],
        "lam": params["gae_lambda"],
        "mask_mode": "skip",
        "reward_bias": params["reward_bias"],
        "reward_bias_sign": "add",
        "reward_scale": params["reward_scaling"],
        "reward_clip": params["reward_clip"],
        **normalisation(params["reward_norm"], "reward_norm"),
        **normalisation(params["adv_norm"], "advantage_norm"),
    }
    if params["kl_ctl"]:
        parameters |= {
            "kl_coef": params["kl_ctl"],
            "kl_estimator": params["kl_estimator"],
            "kl_clip": 10.0,
        }
    if params["overlong_reward_penalty"]:
        parameters |= {
            "overlong_penalty": params["overlong_penalty_factor"],
            "overlong_buffer": params["overlong_tokens"],
            "max_response_tokens": params["max_new_tokens"],
        }
    return parameters


def areal_groups(case: Case, *, padding: int = 0, bootstraps: bool = True) -> list[list[Any]]:
    """AReaL's rows in its groups: each with one token less, and moved by one."""
    given, params = case["inputs"], case["params"]
    width = given["input_ids"]["shape"][1]
    filled = [sum(row) == width for row in rows(given["attention_mask"])]
    values = rows(given["values"]) if "values" in given else [[0.0] * width] * len(filled)
    members = []
    for b, mask in enumerate(rows(given["loss_mask"])):
        logprobs: dict[str, list[float]] = {"logprobs": rows(given["logprobs"])[b][1:]}
        if "ref_logp" in given:
            logprobs["ref_logprobs"] = rows(given["ref_logp"])[b][: width - 1]
        endless = filled[b] and params["mask_no_eos_with_zero"]
        gap = [math.nan] * padding
        lengthened: dict[str, Any] = {name: [*row, *gap] for name, row in logprobs.items()}
        own = values[b] if bootstraps else [*values[b][: width - 1], *gap]
        members.append(
            experience(
                0.0 if endless else given["rewards"]["data"][b],
                [*mask[1:], *[0] * padding],
                mask_dtype="I32",
                values=own,
                truncated=bootstraps and filled[b],
                **lengthened,
            )
        )
    size = max((params[k] or {}).get("group_size", 1) for k in ("reward_norm", "adv_norm"))
    return chunks(members, size)


def check_areal(case: Case, results: list[Computed]) -> None:
    width = case["inputs"]["input_ids"]["shape"][1] - 1
    masks = [mask[1:] for mask in rows(case["inputs"]["loss_mask"])]
    for key in ("advantages", "returns"):
        expected = rows(case["expected"][key])
        for result, row, mask in zip(results, expected, masks, strict=True):
            assert_close(getattr(result, key), row[:width], mask, 3e-5)


@pytest.mark.parametrize("case", ADVANTAGES)
def test_whole_pipeline(case: Case) -> None:
    results, _ = launch(areal_groups(case), "gae", areal_parameters(case["params"]))
    check_areal(case, results)


def test_padding_does_not_make_an_experience_truncated() -> None:
    case = only("areal_advantages", "PPOActor._compute_advantages", noted=True)
    width = case["inputs"]["input_ids"]["shape"][1]
    filled = [sum(row) == width for row in rows(case["inputs"]["attention_mask"])]
    assert any(filled)
    parameters = areal_parameters(case["params"])
    plain, _ = launch(areal_groups(case, bootstraps=False), "gae", parameters)
    padded, _ = launch(areal_groups(case, padding=3, bootstraps=False), "gae", parameters)
    for one, other in zip(plain, padded, strict=True):
        assert other.advantages == [*one.advantages, 0.0, 0.0, 0.0]
        assert other.returns == [*one.returns, 0.0, 0.0, 0.0]
    masks = [mask[1:] for mask in rows(case["inputs"]["loss_mask"])]
    for key, exempt in (("unpadded", filled), ("padded_by_3", [False] * len(filled))):
        expected = rows(case["expected"][key]["advantages"])
        # The original bootstraps a row that fills the width, until it is padded.
        for result, row, mask, full in zip(plain, expected, masks, exempt, strict=True):
            if not full:
                assert_close(result.advantages, row[: width - 1], mask, 3e-5)
