"""Columns and experiences from Python lists, and lists from results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experience_buffer_server.advantages import (
    Column,
    ExperienceAdvantages,
    ExperienceInput,
    GroupFailure,
    GroupResult,
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
    dtype: str = "F32",
    truncated: bool = False,
    run: str = "",
    step: int = 0,
) -> ExperienceInput:
    return ExperienceInput(
        reward=reward,
        mask=column(mask, mask_dtype),
        token_level_reward=(
            None if token_level_reward is None else column(token_level_reward, dtype)
        ),
        values=None if values is None else column(values, dtype),
        truncated=truncated,
        run=run,
        step=step,
    )


def floats(data: bytes) -> list[float]:
    return list(memoryview(data).cast("f"))


def advantages(item: ExperienceAdvantages) -> list[float]:
    return floats(item.advantages)


def computed(outcome: GroupResult | GroupFailure) -> GroupResult:
    assert isinstance(outcome, GroupResult), outcome
    return outcome


def failed(outcome: GroupResult | GroupFailure) -> str:
    assert isinstance(outcome, GroupFailure), outcome
    return outcome.error
