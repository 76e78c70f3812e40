from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experience_buffer.offpolicy import ProximalMethod, proximal_logprobs, second_moment_mask

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
Case = dict[str, Any]


def cases(fn: str) -> list[Any]:
    loaded = json.loads((GOLDENS / "areal_staleness.json").read_text())["cases"]
    chosen = [pytest.param(case, id=case["name"]) for case in loaded if case["fn"] == fn]
    assert len(chosen) == 2
    return chosen


def tensor(described: dict[str, Any]) -> Tensor:
    flat = torch.tensor(described["data"], dtype=getattr(torch, described["dtype"]))
    return flat.reshape(described["shape"])


@pytest.mark.parametrize("method", ["loglinear", "linear", "rollout"])
@pytest.mark.parametrize("case", cases("compute_prox_logp_approximations"))
def test_proximal_matches_areal(case: Case, method: ProximalMethod) -> None:
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    found = proximal_logprobs(
        inputs["old_logp"],
        current_logprobs=inputs["logprobs"],
        versions=inputs["versions"],
        current_version=case["params"]["current_version"],
        method=method,
    )
    torch.testing.assert_close(found, tensor(case["expected"][method]), rtol=3e-5, atol=3e-5)


def test_interpolation_by_hand() -> None:
    behaviour = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.1]).log()
    current = torch.tensor([0.4, 0.4, math.nan, math.nan, math.nan, math.nan]).log()
    versions = torch.tensor([5, 3, 6, 7, 8, -1], dtype=torch.int8)
    found = {
        method: proximal_logprobs(
            behaviour,
            current_logprobs=current,
            versions=versions,
            current_version=7,
            method=method,
        )
        .exp()
        .tolist()
        for method in ("loglinear", "linear")  # type: tuple[ProximalMethod, ...]
    }
    # Half and three quarters of the way; 6, 7, 8 and unknown don't read the current value.
    assert found["loglinear"] == pytest.approx([0.2, 0.1 * 4**0.75, 0.1, 0.1, 0.1, 0.1])
    assert found["linear"] == pytest.approx([0.25, 0.325, 0.1, 0.1, 0.1, 0.1])


def test_versions_of_a_narrow_dtype_do_not_wrap_around() -> None:
    found = proximal_logprobs(
        torch.tensor([-1.0, -1.0]),
        current_logprobs=torch.tensor([0.0, 0.0]),
        versions=torch.tensor([0, 200], dtype=torch.uint8),
        current_version=300,
    )
    assert found.tolist() == pytest.approx([-1 / 300, -1 / 100])


def test_linear_holds_where_probabilities_underflow() -> None:
    found = proximal_logprobs(
        torch.tensor([-200.0]),
        current_logprobs=torch.tensor([-201.0]),
        versions=torch.tensor([0]),
        current_version=2,
        method="linear",
    )
    assert found.item() == pytest.approx(-200 + math.log((1 + math.exp(-1)) / 2))


def test_a_policy_that_did_not_change_is_its_own_proximal() -> None:
    logprobs = -torch.rand(997, dtype=torch.float64)
    found = proximal_logprobs(
        logprobs, current_logprobs=logprobs, versions=torch.arange(997), current_version=1009
    )
    assert found.equal(logprobs)


@pytest.mark.parametrize("method", ["loglinear", "linear", "rollout"])
def test_no_gradient_and_at_least_float32(method: ProximalMethod) -> None:
    current = torch.tensor([-0.5, -0.25], dtype=torch.bfloat16, requires_grad=True)
    found = proximal_logprobs(
        torch.tensor([-1.0, -2.0], dtype=torch.float16),
        current_logprobs=current,
        versions=torch.tensor([0, 200], dtype=torch.uint8),
        current_version=300,
        method=method,
    )
    assert not found.requires_grad
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": torch.zeros(3)}, "versions is torch.float32.*; give a tensor of an integer"),
        ({"versions": torch.ones(3, dtype=torch.bool)}, "versions is torch.bool"),
        ({"versions": torch.tensor(1)}, r"versions has shape \[\], behaviour_logprobs \[3\]"),
        ({"current_logprobs": torch.zeros(1, 3)}, r"current_logprobs has shape \[1, 3\]"),
        ({"current_version": -1}, "current_version is -1; give a whole number of at least 0"),
        ({"method": "recompute"}, "method is 'recompute'; give one of"),
    ],
)
def test_bad_arguments_of_proximal(changes: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {
        "current_logprobs": torch.zeros(3),
        "versions": torch.zeros(3, dtype=torch.int64),
        "current_version": 1,
    }
    with pytest.raises(ValueError, match=reason):
        proximal_logprobs(torch.zeros(3), **(given | changes))


@pytest.mark.parametrize("case", cases("_apply_m2po_masking"))
def test_second_moment_matches_areal(case: Case) -> None:
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    found = second_moment_mask(
        inputs["old_logp"],
        proximal_logprobs=inputs["prox_logp"],
        mask=inputs["loss_mask"],
        threshold=case["params"]["m2_threshold"],
    )
    assert found.equal(tensor(case["expected"]["loss_mask"]))


@given(
    st.lists(st.tuples(st.integers(-4, 4), st.booleans()), max_size=30),
    st.sampled_from([0.25, 1.0, 2.5, 100.0]),
)
def test_second_moment_agrees_with_masking_one_by_one(
    tokens: list[tuple[int, bool]], threshold: float
) -> None:
    deltas = torch.tensor([float(delta) for delta, _ in tokens])
    kept = [index for index, (_, valid) in enumerate(tokens) if valid]
    while kept and sum(tokens[index][0] ** 2 for index in kept) / len(kept) >= threshold:
        kept.remove(max(kept, key=lambda index: (tokens[index][0] ** 2, index)))
    found = second_moment_mask(
        deltas,
        proximal_logprobs=torch.zeros_like(deltas),
        mask=torch.tensor([valid for _, valid in tokens], dtype=torch.int32),
        threshold=threshold,
    )
    assert found.nonzero().flatten().tolist() == kept


def test_garbage_counts_as_largest_and_is_not_read_where_masked() -> None:
    found = second_moment_mask(
        torch.tensor([[0.1, math.nan, math.inf], [0.1, math.nan, 0.0]]),
        proximal_logprobs=torch.zeros(2, 3),
        mask=torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),
        threshold=0.04,
    )
    assert found.tolist() == [[True, False, False], [True, False, False]]


def test_no_token_is_kept_out_of_bounds() -> None:
    """AReaL keeps the token with the smallest moment here, though that is over the threshold."""
    found = second_moment_mask(
        torch.tensor([1.0, 2.0]),
        proximal_logprobs=torch.zeros(2),
        mask=torch.ones(2),
        threshold=0.04,
    )
    assert found.tolist() == [False, False]


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_bad_thresholds(threshold: float) -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match="give a number above 0"):
        second_moment_mask(zeros, proximal_logprobs=zeros, mask=zeros, threshold=threshold)


def test_bad_shapes_of_the_mask() -> None:
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match=r"mask has shape \[3\], behaviour_logprobs \[2\]"):
        second_moment_mask(zeros, proximal_logprobs=zeros, mask=torch.ones(3), threshold=1.0)
