"""Whole launches, from raw bytes to bytes, on the CPU and on a torch device in turns.

What a device costs beyond its arithmetic, a launch pays once: small ones say whether it is worth it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.advantage_loops import distance
from experience_buffer_server.advantages import Column, ExperienceInput, GroupResult, compute

_GROUP_SIZE = 8
_TOKENS_EACH = 1024
_NUM_GROUPS = (1, 4, 32, 256, 2048)
"""Of 8,192 tokens each; four are as many as the server launches at once by default."""
_MIN_RUNS, _MAX_RUNS = 5, 100
_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way of computing."""

    title: str
    estimator: str
    parameters: Mapping[str, float | str]


_PLANS = (
    _Plan("grpo", "grpo", {}),
    _Plan("reinforce, discount, KL k3", "reinforce", {"gamma": 0.99, "kl_coef": 0.01, "kl_estimator": "k3"}),
    _Plan("gae, whitened", "gae", {"advantage_norm_mean": "batch", "advantage_norm_std": "batch"}),
)  # fmt: skip


def launches(device: str, threads: int) -> float:
    """Print milliseconds per launch of several sizes.

    Args:
        device: As `compute` takes it.
        threads: For the second figure of the CPU; the first is with one.

    Returns:
        The largest difference of a device's results to the CPU's.
    """
    print(
        f"\nLaunches, bytes to bytes, groups of {_GROUP_SIZE} with {_TOKENS_EACH:,} tokens each; "
        "ms, medians in turns"
    )
    print(
        f"{'plan':28}{'tokens':>12}{'cpu':>10}{f'cpu x{threads}':>10}{device:>12}{'ratio':>8}"
        "  difference"
    )
    return max(
        _line(plan, num_groups, device, threads) for plan in _PLANS for num_groups in _NUM_GROUPS
    )


def _line(plan: _Plan, num_groups: int, device: str, threads: int) -> float:
    groups = _groups(num_groups)

    def run(device: str, threads: int) -> Callable[[], Sequence[object]]:
        return lambda: compute(
            groups, estimator=plan.estimator, parameters=plan.parameters,
            device=device, threads=threads,
        )  # fmt: skip

    ways = [run("cpu", 1), run("cpu", threads), run(device, 1)]
    expected, _, found = [_flat(way()) for way in ways]
    difference = distance(found, expected)
    single, several, other = _in_turns(ways)
    tokens = num_groups * _GROUP_SIZE * _TOKENS_EACH
    print(
        f"{plan.title:28}{tokens:12,}{single:10.2f}{several:10.2f}{other:12.2f}"
        f"{single / other:8.2f}  {difference:.1e}",
        flush=True,
    )
    return difference


def _groups(count: int) -> list[list[ExperienceInput]]:
    rng = np.random.default_rng(count)
    mask = Column("BOOL", b"\1" * _TOKENS_EACH)

    def column(scale: float) -> Column:
        return Column("F32", (rng.normal(size=_TOKENS_EACH) * scale).astype("<f4").tobytes())

    return [
        [
            ExperienceInput(
                reward=float(rng.normal()), mask=mask, values=column(1.0),
                logprobs=column(0.1), ref_logprobs=column(0.1),
            )
            for _ in range(_GROUP_SIZE)
        ]
        for _ in range(count)
    ]  # fmt: skip


def _flat(outcomes: Sequence[object]) -> NDArray[np.float32]:
    parts = [
        np.frombuffer(memoryview(item.advantages).cast("B"), dtype="<f4")
        for outcome in outcomes
        if isinstance(outcome, GroupResult)
        for item in outcome.items
    ]
    return np.concatenate(parts)


def _in_turns(ways: Sequence[Callable[[], object]]) -> list[float]:
    seconds: list[list[float]] = [[] for _ in ways]
    deadline = time.perf_counter() + _SECONDS * len(ways)
    while len(seconds[0]) < _MIN_RUNS or (
        time.perf_counter() < deadline and len(seconds[0]) < _MAX_RUNS
    ):
        for own, way in zip(seconds, ways, strict=True):
            started = time.perf_counter()
            way()
            own.append(time.perf_counter() - started)
    return [statistics.median(own) * 1e3 for own in seconds]
