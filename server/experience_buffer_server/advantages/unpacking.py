"""From the arrays of one launch to results per experience and group, and what is recorded.

Legend: G groups, D tokens of all experiences.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.values import (
    Detail,
    ExperienceAdvantages,
    GroupDetails,
)
from experience_buffer_server.advantages.plan.parameters import BatchParameters
from experience_buffer_server.advantages.plan.specs import Plan

Results = tuple[NDArray[np.float32], ...]
"""Advantages, and returns if they differ, each of shape [D]."""


def apply_policy(
    batch: Batch, parameters: BatchParameters, details: GroupDetails, results: Results
) -> None:
    """Zero or mark the groups whose rewards are all equal, as configured."""
    policy = getattr(parameters, "zero_variance", "keep")
    if policy == "keep":
        return
    bounds_G = batch.offsets[batch.group_offsets].tolist()
    for own, start, stop in zip(details, bounds_G, bounds_G[1:], strict=False):
        if not own.get("zero_variance"):
            continue
        if policy == "withhold":
            own["withheld"] = True
            continue
        own["masked"] = True
        for result in results:
            result[start:stop] = 0.0


def cut(batch: Batch, details: GroupDetails, results: Results) -> list[ExperienceAdvantages]:
    """Cut the results into views per experience."""
    for result in results:
        result.setflags(write=False)
    views = [result.view(np.uint8).data for result in results]
    advantages, returns = views[0], views[-1]
    bounds = (batch.offsets * np.dtype(np.float32).itemsize).tolist()
    alone_G = np.array([bool(own.get("singleton")) for own in details], dtype=np.bool_)
    alone_B = np.repeat(alone_G, np.diff(batch.group_offsets)).tolist()
    zero_masks, bootstrapped = (batch.num_valid == 0).tolist(), batch.bootstrapped.tolist()
    magnitudes = _means(np.abs(results[0]), batch, np.diff(batch.offsets)).tolist()
    means = _means(results[0], batch, batch.num_valid).tolist()
    return [
        ExperienceAdvantages(
            advantages=(own := advantages[start:stop]),
            returns=own if returns is advantages else returns[start:stop],
            singleton=singleton,
            zero_mask=zero_mask,
            bootstrapped=is_bootstrapped,
            magnitude=magnitude,
            mean=mean,
        )
        for (start, stop), singleton, zero_mask, is_bootstrapped, magnitude, mean in zip(
            *(itertools.pairwise(bounds), alone_B, zero_masks, bootstrapped, magnitudes, means),
            strict=True,
        )
    ]


def _means(
    values: NDArray[np.float32], batch: Batch, counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Sum of each experience's values, shape [D], by a count of its tokens, shape [B]; 0 without any."""
    means = np.zeros(len(counts))
    some = (np.diff(batch.offsets) > 0) & (counts > 0)
    if some.any():
        # A sum ends where the next one begins: those without tokens have none in between.
        has_tokens = np.diff(batch.offsets) > 0
        sums = np.add.reduceat(values, batch.offsets[:-1][has_tokens], dtype=np.float64)
        means[some] = sums[some[has_tokens]] / counts[some]
    return means


def common_details(plan: Plan) -> dict[str, Detail]:
    """The estimator, and its parameters that differ from their defaults."""
    given = {
        f"parameters.{known.name}": value
        for known in dataclasses.fields(plan.parameters)
        if (value := getattr(plan.parameters, known.name)) != known.default
    }
    return {"estimator": plan.spec.name, **given}


def batch_details(batch: Batch, parameters: BatchParameters) -> list[dict[str, Detail]]:
    """How many groups that aren't empty, and experiences, each group's statistics batch had."""
    if not parameters.uses_batch:
        return [{} for _ in batch.batches]
    sizes_G = np.diff(batch.group_offsets)
    groups = np.bincount(batch.batches, weights=sizes_G > 0).astype(np.int64)
    members = np.bincount(batch.batches, weights=sizes_G).astype(np.int64)
    return [
        {"batch_groups": int(groups[number]), "batch_members": int(members[number])}
        for number in batch.batches.tolist()
    ]
