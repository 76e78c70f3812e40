"""Results of the original implementations, pinned as JSON.

Each file holds cases `{name, fn, params, inputs, expected, note?}`. Float64 cases go through the
packed functions, whose results are float64; float32 cases through `compute`. A case with a note
pins a bug of the original; for those, and where the original is silent or loses float32 digits, the
tests say what happens here instead.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from experience_buffer_server.advantages import ExperienceInput, compute, validate_parameters
from experience_buffer_server.advantages.packed import pack
from experience_buffer_server.advantages.registry import REGISTRY

from .builders import computed, experience, floats

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
TOLERANCE = {"float64": 1e-11, "float32": 3e-5}
CODES = {"float64": "F64", "float32": "F32"}
Case = dict[str, Any]
Rows = list[list[Any]]


def cases(file: str, fn: str, *, noted: bool = False) -> list[Any]:
    """Cases of a function, as pytest parameters; empty selections are an error."""
    loaded = json.loads((GOLDENS / f"{file}.json").read_text())["cases"]
    chosen = [c for c in loaded if c["fn"] == fn and ("note" in c) == noted]
    assert chosen, (file, fn)
    return [pytest.param(c, id=c["name"]) for c in chosen]


def rows(tensor: Any) -> Rows:
    """Rows of a 2-D tensor, or of a list of 1-D ones."""
    if isinstance(tensor, list):
        return [part["data"] for part in tensor]
    count, width = tensor["shape"]
    return [tensor["data"][b * width : (b + 1) * width] for b in range(count)]


def chunks(values: list[float], size: int) -> list[list[float]]:
    """Groups as the originals take them: by position."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def dtype_of(tensor: Any) -> str:
    return str((tensor[0] if isinstance(tensor, list) else tensor)["dtype"])


def token_results(
    inputs: list[ExperienceInput], estimator: str, parameters: dict[str, Any], dtype: str
) -> list[tuple[list[float], list[float]]]:
    """Advantages and returns per experience: float32 from `compute`, float64 from the functions."""
    if dtype == "float32":
        result = computed(compute([inputs], estimator=estimator, parameters=parameters)[0])
        return [(floats(item.advantages), floats(item.returns)) for item in result.items]
    batch = pack([inputs], values=estimator == "gae", votes=False)
    tokens = REGISTRY[estimator].tokens(batch, validate_parameters(estimator, parameters))
    dense = [[0.0] * batch.dense_offsets[-1] for _ in range(2)]
    for target, packed in zip(dense, (tokens.advantages, tokens.returns), strict=True):
        for position, value in zip(batch.positions.tolist(), packed.tolist(), strict=True):
            target[position] = value
    return [
        (dense[0][start:stop], dense[1][start:stop])
        for start, stop in itertools.pairwise(batch.dense_offsets)
    ]


def assert_close(
    actual: list[float], expected: list[float], mask: list[bool], tolerance: float
) -> None:
    assert all(value == 0.0 for value, valid in zip(actual, mask, strict=True) if not valid)
    kept = [value for value, valid in zip(expected, mask, strict=True) if valid]
    got = [value for value, valid in zip(actual, mask, strict=True) if valid]
    assert got == pytest.approx(kept, rel=tolerance, abs=tolerance)


def check_tokens(case: Case, estimator: str, rewards_key: str = "rewards") -> None:
    """Recursion cases of LightRFT, where a masked token is a step."""
    given, params = case["inputs"], case["params"]
    rewards, dtype = rows(given[rewards_key]), dtype_of(given[rewards_key])
    masks = (
        rows(given["action_mask"])
        if given.get("action_mask") is not None
        else [[True] * len(row) for row in rewards]
    )
    values = rows(given["values"]) if estimator == "gae" else [None] * len(rewards)
    inputs = [
        experience(None, mask, token_level_reward=reward, values=value, dtype=CODES[dtype])
        for mask, reward, value in zip(masks, rewards, values, strict=True)
    ]
    parameters = {"gamma": params["gamma"], "mask_mode": "count"}
    if estimator == "gae":
        parameters["lam"] = params["lambd"]
    results = token_results(inputs, estimator, parameters, dtype)
    for key, index in (("advantages", 0), ("returns", 1)):
        if key in case["expected"]:
            expected = rows(case["expected"][key])
            for result, row, mask in zip(results, expected, masks, strict=True):
                assert_close(result[index], row, mask, TOLERANCE[dtype])
