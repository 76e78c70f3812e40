"""Whether one group can be computed, decided before it shares a launch with others.

Looks at fields, dtypes, lengths and scalars, of what the plan reads only. Numbers inside tensors
and votes are looked at when the launch is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experience_buffer_server.advantages.arrays.values import (
    MASK_DTYPES,
    NUMBER_DTYPES,
    Column,
    ExperienceInput,
    GroupError,
)
from experience_buffer_server.advantages.plan.specs import COLUMNS, Plan

_FLOAT32_END = 2.0**128 - 2.0**103
"""From here on a float64 rounds to an infinite float32."""
_INT64_END = 2**63

_CURES = {
    "reward": "push it with a reward, or push a tombstone for a rollout that failed",
    "baseline_reward": "send the reward of the greedy response to the same prompt",
    "env_state_hash": "send the hash of the environment's state before this step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a plan reads of each experience."""

    needs: tuple[tuple[str, ...], ...]
    """Fields of which an experience must carry one."""
    columns: tuple[str, ...]
    """Those of `COLUMNS` that are read where they are given."""
    fields: frozenset[str]
    """Every field that is read."""
    votes: bool
    """Whether runs and steps are read."""
    turns: bool
    """Whether the number of turns is read."""


def reads_of(plan: Plan) -> Reads:
    """Find what a plan reads; its parameters decide as well as its estimator."""
    needs = tuple(tuple(need.split("|")) for need in plan.needs)
    fields = frozenset(name for need in needs for name in need)
    return Reads(
        needs=needs,
        columns=tuple(name for name in COLUMNS if name in fields),
        fields=fields,
        votes=plan.scope == "group",
        turns=getattr(plan.parameters, "turn_rewards", "none") == "concatenated",
    )


def check_group(members: Sequence[ExperienceInput], *, reads: Reads) -> None:
    """Raise unless every member carries what is read, in a form that can be read.

    Raises:
        GroupError: Names the member by its index, the field, and what to send instead.
    """
    reads_reward = "reward" in reads.fields
    prefers_tokens = "token_level_reward" in reads.fields
    for index, member in enumerate(members):
        num_tokens = _length(member.mask, MASK_DTYPES, "mask", index)
        for need in reads.needs:
            for name in need:
                if getattr(member, name) is not None:
                    break
            else:
                raise _missing(need, index, num_tokens)
        for name in reads.columns:
            column: Column | None = getattr(member, name)
            if column is not None:
                _check_length(column, name, index, num_tokens)
        if reads_reward and not (prefers_tokens and member.token_level_reward is not None):
            _check_scalar(member.reward, "reward", index)
        if "baseline_reward" in reads.fields:
            _check_scalar(member.baseline_reward, "baseline_reward", index)
        if "env_state_hash" in reads.fields and not member.env_state_hash:
            raise _missing(("env_state_hash",), index, num_tokens)
        if reads.votes and not -_INT64_END <= member.step < _INT64_END:
            raise GroupError(
                f"step of experience {index} of the group is {member.step}; send an int64"
            )
        turns = member.num_turns if reads.turns else None
        if turns is not None and not 1 <= turns < _INT64_END:
            raise GroupError(
                f"num_turns of experience {index} of the group is {turns}; send 1 or more, or "
                "leave it out to have the stretches of its mask counted"
            )


def _missing(need: tuple[str, ...], index: int, num_tokens: int) -> GroupError:
    name = need[0]
    cure = _CURES.get(
        name, f"send it as an extra tensor or a list in info, of {num_tokens} numbers"
    )
    others = "".join(f" (and so is {other}, which would do)" for other in need[1:])
    return GroupError(f"{name} of experience {index} of the group is missing{others}; {cure}")


def _check_scalar(value: float | None, name: str, index: int) -> None:
    # NaN fails the comparison.
    if value is None or not -_FLOAT32_END < value < _FLOAT32_END:
        raise GroupError(
            f"{name} of experience {index} of the group is {value!r}, not finite in float32; push "
            "a finite one, or push a tombstone for a rollout that failed"
        )


def _check_length(column: Column, name: str, index: int, num_tokens: int) -> None:
    length = _length(column, NUMBER_DTYPES, name, index)
    if length == num_tokens or (name == "values" and length == num_tokens + 1):
        return
    expected = f"{num_tokens} or {num_tokens + 1}" if name == "values" else f"{num_tokens}"
    raise GroupError(
        f"{name} of experience {index} of the group has {length} elements where its mask has "
        f"{num_tokens}; send {expected}"
    )


def _length(column: Column, sizes: dict[str, int], name: str, index: int) -> int:
    size = sizes.get(column.dtype)
    if size is None:
        raise GroupError(
            f"{name} of experience {index} of the group has dtype {column.dtype}; send one of "
            f"{', '.join(sizes)}"
        )
    length, rest = divmod(column.num_bytes, size)
    if rest:
        raise GroupError(
            f"{name} of experience {index} of the group has {column.num_bytes} bytes, not a "
            f"multiple of the {size} of {column.dtype}"
        )
    return length
