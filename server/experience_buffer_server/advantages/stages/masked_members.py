"""Members of groups without a valid token: which of them take no part, and what they get.

With `masked_votes` off a run that isn't trained on is computed with as little as if it weren't there: it
has no vote in any statistic, of its group, of a batch, or of all rewards so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from experience_buffer_server.advantages.arrays.decoding import decode_mask
from experience_buffer_server.advantages.arrays.values import (
    MASK_DTYPES,
    ExperienceAdvantages,
    ExperienceInput,
    GroupResult,
)
from experience_buffer_server.advantages.plan.parameters import BatchParameters

_FLOAT32_BYTES = np.dtype(np.float32).itemsize


def trained_places(members: Sequence[ExperienceInput], *, by_run: bool) -> list[int]:
    """The places, in a checked group, of those that are trained on, or whose run is.

    Args:
        members: Of the group.
        by_run: Whether the steps of a run speak for one another.
    """
    valid = [bool(decode_mask(one.mask.data, one.mask.dtype).any()) for one in members]
    runs = {one.run for one, is_valid in zip(members, valid, strict=True) if is_valid and one.run}
    return [
        place
        for place, one in enumerate(members)
        if valid[place] or (by_run and one.run and one.run in runs)
    ]


def with_masked(
    result: GroupResult,
    members: Sequence[ExperienceInput],
    places: Sequence[int],
    parameters: BatchParameters,
) -> GroupResult:
    """The result of a whole group, of which those at some places were computed.

    A group of which nobody is trained on has nothing to tell apart: it is of zero variance.
    """
    if len(places) == len(members):
        return result
    computed = dict(zip(places, result.items, strict=True))
    items = tuple(computed.get(place) or _nothing(one) for place, one in enumerate(members))
    details = {**result.details, "members": len(members)}
    policy = getattr(parameters, "zero_variance", "")
    if policy and not places:
        details["zero_variance"] = True
        if policy == "withhold":
            details["withheld"] = True
    return dataclasses.replace(result, items=items, details=details)


def _nothing(member: ExperienceInput) -> ExperienceAdvantages:
    num_tokens = member.mask.num_bytes // MASK_DTYPES[member.mask.dtype]
    zeros = bytes(num_tokens * _FLOAT32_BYTES)
    return ExperienceAdvantages(advantages=zeros, returns=zeros, zero_mask=True)
