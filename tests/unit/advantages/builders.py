"""Columns and experiences from Python lists, and lists from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from experience_buffer_server.advantages import (
    Column,
    ExperienceAdvantages,
    ExperienceInput,
    GroupFailure,
    GroupResult,
    compute,
)

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64,
}  # fmt: skip


def column(values: Sequence[float | bool], dtype: str) -> Column:
    tensor = torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype])
    return Column(dtype, tensor.view(torch.uint8).numpy().tobytes() if values else b"")


def experience(
    reward: float | None = 1.0,
    mask: Sequence[float | bool] = (True, True),
    *,
    mask_dtype: str = "BOOL",
    token_level_reward: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
    ref_logprobs: Sequence[float] | None = None,
    teacher_logprobs: Sequence[float] | None = None,
    baseline_reward: float | None = None,
    env_state_hash: str | None = None,
    dtype: str = "F32",
    truncated: bool = False,
    run: str = "",
    step: int = 0,
    num_turns: int | None = None,
) -> ExperienceInput:
    def floating(given: Sequence[float] | None) -> Column | None:
        return None if given is None else column(given, dtype)

    return ExperienceInput(
        reward=reward,
        mask=column(mask, mask_dtype),
        token_level_reward=floating(token_level_reward),
        values=floating(values),
        logprobs=floating(logprobs),
        ref_logprobs=floating(ref_logprobs),
        teacher_logprobs=floating(teacher_logprobs),
        baseline_reward=baseline_reward,
        env_state_hash=env_state_hash,
        truncated=truncated,
        run=run,
        step=step,
        num_turns=num_turns,
    )


def floats(data: bytes | memoryview) -> list[float]:
    return list(memoryview(data).cast("B").cast("f"))


def advantages(item: ExperienceAdvantages) -> list[float]:
    return floats(item.advantages)


def computed(outcome: GroupResult | GroupFailure) -> GroupResult:
    assert isinstance(outcome, GroupResult), outcome
    return outcome


def failed(outcome: GroupResult | GroupFailure) -> str:
    assert isinstance(outcome, GroupFailure), outcome
    return outcome.error


def scores(
    members: Sequence[ExperienceInput], estimator: str = "grpo", **parameters: Any
) -> list[float]:
    """The advantage of the first token of each member of a group."""
    outcome = compute([members], estimator=estimator, parameters=parameters)[0]
    return [advantages(item)[0] for item in computed(outcome).items]
