"""Experiences as Python lists, their batch, and the recursions as loops over single tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import KlTerm, TokenStages
from experience_buffer_server.advantages.kernels.devices import token_stages

from . import reference
from .reference_rewards import Member, token_rewards

COLUMNS = ("token_level_reward", "values", "logprobs", "ref_logprobs", "teacher_logprobs")
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


@dataclass
class Row:
    """One experience as Python lists; masked slots of the columns hold garbage."""

    mask: list[bool]
    reward: float
    bootstrap: float
    has_token_rewards: bool
    columns: dict[str, list[float]] = field(default_factory=dict)


def make_rows(
    seed: int, *, lengths: Sequence[int] | None = None, columns: Sequence[str] = COLUMNS
) -> list[Row]:
    """Rows of all kinds: without tokens, all masked, masked inside, at the end, nowhere."""
    rng = np.random.default_rng(seed)
    if lengths is None:
        lengths = rng.choice([0, 1, 2, 7, 8, 9, 64, 113, 500], size=rng.integers(1, 9)).tolist()
    rows = []
    for length in lengths:
        mask = (rng.random(length) < rng.choice([0.0, 0.3, 0.9, 1.0])).tolist()
        row = Row(mask, float(np.float32(rng.normal())), float(rng.normal()), rng.random() < 0.5)
        for name in columns:
            numbers = rng.normal(size=length).astype(np.float32).tolist()
            garbage = rng.choice(GARBAGE, size=length).tolist()
            row.columns[name] = [
                n if m else g for n, m, g in zip(numbers, mask, garbage, strict=True)
            ]
        rows.append(row)
    return rows


def make_batch(rows: Sequence[Row], dtype: type[np.floating[Any]] = np.float32) -> Batch:
    names = rows[0].columns if rows else ()
    joined = {name: list(itertools.chain(*(row.columns[name] for row in rows))) for name in names}
    offsets = np.cumsum([0, *(len(row.mask) for row in rows)])
    alone = np.arange(len(rows))
    return Batch(
        group_offsets=np.array([0, len(rows)]),
        batches=np.zeros(1, dtype=np.int64),
        voters=alone,
        first_steps=alone,
        next_steps=np.full(len(rows), -1),
        places=alone,
        offsets=offsets,
        mask=np.array(list(itertools.chain(*(row.mask for row in rows))), dtype=np.uint8),
        num_valid=np.array([sum(row.mask) for row in rows], dtype=np.int64),
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        has_token_rewards=np.array([row.has_token_rewards for row in rows], dtype=np.bool_),
        num_turns=np.ones(len(rows), dtype=np.int64),
        baselines=np.zeros(len(rows)),
        states=("",) * len(rows),
        bootstraps=np.array([row.bootstrap for row in rows], dtype=np.float64),
        bootstrapped=np.ones(len(rows), dtype=np.bool_),
        columns={name: np.array(numbers, dtype=dtype) for name, numbers in joined.items()},
        problems={},
    )


def make_stages(batch: Batch, device: str, *, threads: int = 1) -> TokenStages:
    return token_stages(batch, device=device, threads=threads, precision="float64")


# The loops. Each takes one row and gives one number per token, 0 where masked.


def member_of(row: Row) -> Member:
    """A row as the reference takes it."""
    column = row.columns.get
    return Member(
        reward=0.0,
        mask=row.mask,
        token_rewards=column("token_level_reward") if row.has_token_rewards else None,
        values=column("values"),
        bootstrap=row.bootstrap,
        logprobs=column("logprobs"),
        ref_logprobs=column("ref_logprobs"),
    )


def loop_rewards(row: Row, kl: KlTerm | None = None) -> list[float]:
    kl = kl or KlTerm(coefficient=0.0, estimator="k1", clip=0.0)
    parameters = SimpleNamespace(kl_coef=kl.coefficient, kl_estimator=kl.estimator, kl_clip=kl.clip)
    return token_rewards(member_of(row), row.reward, parameters)[0]


def loop_returns(row: Row, rewards: Sequence[float], gamma: float, mode: str) -> list[float]:
    return reference.returns(list(rewards), row.mask, gamma=gamma, mode=mode)


def loop_gae(
    row: Row, rewards: Sequence[float], gamma: float, lam: float, mode: str
) -> tuple[list[float], list[float]]:
    parameters = SimpleNamespace(gamma=gamma, lam=lam, mask_mode=mode)
    return reference.gae(list(rewards), member_of(row), parameters)
