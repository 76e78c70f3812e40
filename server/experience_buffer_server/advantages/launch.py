"""One launch: many groups checked, packed, computed together, and unpacked.

Knows no estimator's formula. Legend: B experiences, N packed tokens, D dense tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .checks import check_group
from .packed import PackedBatch, all_finite, is_bootstrapped, pack
from .registry import REGISTRY
from .specs import (
    EstimatorParameters,
    EstimatorSpec,
    ParameterValue,
    estimator_spec,
    validate_parameters,
)
from .token_returns import TokenAdvantages
from .values import ExperienceAdvantages, ExperienceInput, GroupError, GroupFailure, GroupResult
from .voting import elect_voters

_FLOAT32_BYTES = 4

Group = Sequence[ExperienceInput]
Details = dict[str, float | int | str | bool]


def run(
    groups: Sequence[Group],
    *,
    estimator: str,
    parameters: Mapping[str, ParameterValue],
    device: str,
) -> list[GroupResult | GroupFailure]:
    """See `advantages.compute`."""
    spec = estimator_spec(estimator)
    checked = validate_parameters(estimator, parameters)
    outcomes: list[GroupResult | GroupFailure | None] = [_refusal(g, spec) for g in groups]
    accepted = [group for group, outcome in zip(groups, outcomes, strict=True) if outcome is None]
    computed = iter(_compute(accepted, spec, checked, torch.device(device)))
    return [next(computed) if outcome is None else outcome for outcome in outcomes]


def _refusal(group: Group, spec: EstimatorSpec) -> GroupFailure | None:
    try:
        check_group(group, spec=spec)
        if spec.scope == "group":
            elect_voters(group)
    except GroupError as error:
        return GroupFailure(str(error))
    return None


def _compute(
    groups: Sequence[Group],
    spec: EstimatorSpec,
    parameters: EstimatorParameters,
    device: torch.device,
) -> list[GroupResult | GroupFailure]:
    functions = REGISTRY[spec.name]
    batch = pack(
        groups,
        token_level_rewards=any("token_level_reward" in need for need in spec.needs),
        values="values" in spec.needs,
        votes=spec.scope == "group",
    )
    details: list[Details] = [{} for _ in groups]
    if functions.scores is not None:
        scored = functions.scores(batch, parameters)
        batch, details = scored.batch, scored.details
    tokens = functions.tokens(batch.to(device), parameters)
    items, problems = _unpack(groups, batch, tokens)
    common: Details = {"estimator": spec.name}
    for field in dataclasses.fields(parameters):
        common[f"parameters.{field.name}"] = getattr(parameters, field.name)
    results: list[GroupResult | GroupFailure] = []
    for (start, stop), group_details in zip(
        itertools.pairwise(batch.group_offsets), details, strict=True
    ):
        bad = next((row for row in range(start, stop) if row in problems), None)
        if bad is not None:
            where = f"experience {bad - start} of the group"
            results.append(GroupFailure(f"{where}: {problems[bad]}; push finite numbers"))
            continue
        own = items[start:stop]
        if group_details.get("singleton"):
            own = [dataclasses.replace(item, singleton=True) for item in own]
        recorded = {**common, "members": stop - start, **group_details}
        results.append(GroupResult(items=tuple(own), details=recorded))
    return results


def _unpack(
    groups: Sequence[Group], batch: PackedBatch, tokens: TokenAdvantages
) -> tuple[list[ExperienceAdvantages], dict[int, str]]:
    """Scatter packed results to dense bytes; also name the experiences that can't be used."""
    packed = [tokens.advantages]
    if tokens.returns is not tokens.advantages:
        packed.append(tokens.returns)
    # One transfer back, after rounding, which halves it.
    host_XN = torch.stack([column.float() for column in packed]).cpu()
    counts = batch.offsets.diff().tolist()
    problems = dict(batch.problems)
    if not all_finite(host_XN):
        rows_N = torch.arange(len(counts)).repeat_interleave(batch.offsets.diff())
        for row in set(rows_N[~host_XN.isfinite().all(0)].tolist()):
            problems.setdefault(row, "the result is beyond float32")
    dense = [_dense_bytes(column, batch) for column in host_XN]
    members = (member for group in groups for member in group)
    items: list[ExperienceAdvantages] = []
    spans = itertools.pairwise(batch.dense_offsets)
    for member, count, (start, stop) in zip(members, counts, spans, strict=True):
        span = slice(start * _FLOAT32_BYTES, stop * _FLOAT32_BYTES)
        parts = [bytes(column[span]) for column in dense]
        items.append(
            ExperienceAdvantages(
                advantages=parts[0],
                returns=parts[-1],
                zero_mask=count == 0,
                bootstrapped=batch.values is not None and is_bootstrapped(member),
            )
        )
    return items, problems


def _dense_bytes(packed_N: Tensor, batch: PackedBatch) -> memoryview:
    dense_D = torch.zeros(batch.dense_offsets[-1], dtype=torch.float32)
    dense_D[batch.positions] = packed_N
    return dense_D.numpy().data.cast("B")
