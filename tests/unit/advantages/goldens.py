"""Results of the original implementations, pinned as JSON.

Each file holds cases `{name, fn, params, inputs, expected, note?}`. Float64 cases go through the
stage functions, whose results are float64; float32 cases and whole pipelines through `compute`. A
case with a note pins a bug of the original; for those, and where the original is silent or loses
float32 digits, the tests say what happens here instead.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experience_buffer_server.advantages import ExperienceInput, GroupResult, compute, plan
from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import TokenStages
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.estimators.registry import REGISTRY
from experience_buffer_server.advantages.kernels.devices import token_stages
from experience_buffer_server.advantages.packing import pack
from experience_buffer_server.advantages.plan.parameters import AdvantageParameters
from experience_buffer_server.advantages.stages.normalise import (
    clip_advantages,
    normalise_across_batch,
    normalise_advantages,
)
from experience_buffer_server.advantages.stages.running_moments import RunningMoments

from .builders import computed, experience, floats

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "bfloat16": 3e-5}
PIPELINE_TOLERANCE = 2e-3
CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16"}
device = "cpu"
"""What is computed on; the fixture `each_device` sets it."""
Case = dict[str, Any]
Rows = list[list[Any]]
Groups = Sequence[Sequence[ExperienceInput]]


@dataclass(frozen=True, slots=True)
class Computed:
    """What was computed for one experience."""

    advantages: list[float]
    returns: list[float]


def cases(file: str, fn: str, *, noted: bool = False) -> list[Any]:
    """Cases of a function, as pytest parameters; empty selections are an error."""
    loaded = json.loads((GOLDENS / f"{file}.json").read_text())["cases"]
    chosen = [c for c in loaded if c["fn"] == fn and ("note" in c) == noted]
    assert chosen, (file, fn)
    return [pytest.param(c, id=c["name"]) for c in chosen]


def only(file: str, fn: str, *, noted: bool = False) -> Case:
    """The one case of a function."""
    (parameter,) = cases(file, fn, noted=noted)
    case: Case = parameter.values[0]
    return case


def rows(tensor: Any) -> Rows:
    """Rows of a 2-D tensor, or of a list of tensors."""
    if isinstance(tensor, list):
        return [
            row
            for part in tensor
            for row in (rows(part) if len(part["shape"]) == 2 else [part["data"]])
        ]
    count, width = tensor["shape"]
    return [tensor["data"][b * width : (b + 1) * width] for b in range(count)]


def masks_of(given: dict[str, Any], like: Rows) -> Rows:
    """The action mask; all tokens are valid where there is none."""
    if given.get("action_mask") is None:
        return [[True] * len(row) for row in like]
    return rows(given["action_mask"])


def dense(
    masks: Rows, rewards: Rows, values: Rows | None = None, *, dtype: str = "float32"
) -> list[ExperienceInput]:
    """Experiences with a reward per token."""
    own: Sequence[Any] = values or [None] * len(masks)
    return [
        experience(None, mask, token_level_reward=reward, values=value, dtype=CODES[dtype])
        for mask, reward, value in zip(masks, rewards, own, strict=True)
    ]


def chunks(values: Sequence[Any], size: int) -> list[list[Any]]:
    """Groups as the originals take them: by position."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def dtype_of(tensor: Any) -> str:
    return str((tensor[0] if isinstance(tensor, list) else tensor)["dtype"])


def launch(
    groups: Groups,
    estimator: str,
    parameters: Mapping[str, Any],
    *,
    moments: RunningMoments | None = None,
) -> tuple[list[Computed], list[GroupResult]]:
    """Results per experience, and per group; one statistics batch."""
    outcomes = compute(
        groups, estimator=estimator, parameters=parameters, moments=moments, device=device
    )
    results = [computed(outcome) for outcome in outcomes]
    return [
        Computed(floats(item.advantages), floats(item.returns))
        for result in results
        for item in result.items
    ], results


def stages_of(batch: Batch) -> TokenStages:
    """The stages over a batch's tokens, in float64."""
    return token_stages(batch, device=device, threads=1, precision="float64")


def exact(groups: Groups, estimator: str, parameters: Mapping[str, Any]) -> list[Computed]:
    """Float64 results of an estimator and the stages over tokens, per experience."""
    planned = plan(estimator, parameters)
    batch = pack(groups, planned, batches=None)
    stages = stages_of(batch)
    chosen = planned.parameters
    functions, rewards_B = REGISTRY[planned.spec.name], batch.rewards
    details: GroupDetails = [{} for _ in groups]
    if functions.scores is not None:
        rewards_B = functions.scores(rewards_B, batch, chosen, details)
    tokens = functions.tokens(stages, rewards_B, batch, chosen)
    advantages = tokens.advantages
    assert isinstance(chosen, AdvantageParameters)
    for stage in (normalise_advantages, clip_advantages, normalise_across_batch):
        advantages = stage(stages, advantages, batch, chosen, details)
    dense = [np.asarray(stages.exact(t)).tolist() for t in (advantages, tokens.returns)]
    return [
        Computed(dense[0][start:stop], dense[1][start:stop])
        for start, stop in itertools.pairwise(batch.offsets.tolist())
    ]


def token_results(
    groups: Groups, estimator: str, parameters: Mapping[str, Any], dtype: str
) -> list[Computed]:
    """Results per experience: float64 from the stages, other dtypes from `compute`."""
    if dtype == "float64":
        return exact(groups, estimator, parameters)
    return launch(groups, estimator, parameters)[0]


def assert_rows(
    results: Sequence[Computed],
    expected: Mapping[str, Any],
    masks: Rows,
    tolerance: float,
    *,
    keys: Sequence[str] = ("advantages", "returns"),
) -> None:
    """Agree with tensors of rows, where the masks are set."""
    for key in keys:
        for result, row, mask in zip(results, rows(expected[key]), masks, strict=True):
            assert_close(getattr(result, key), row, mask, tolerance)


def assert_close(
    actual: Sequence[float], expected: Sequence[float], mask: Sequence[Any], tolerance: float
) -> None:
    """Agree where the mask is set, and nothing elsewhere."""
    assert all(value == 0.0 for value, valid in zip(actual, mask, strict=True) if not valid)
    kept = [value for value, valid in zip(expected, mask, strict=True) if valid]
    got = [value for value, valid in zip(actual, mask, strict=True) if valid]
    assert got == pytest.approx(kept, rel=tolerance, abs=tolerance)
