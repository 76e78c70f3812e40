"""What a delivery must carry, worked out apart from the server."""

from __future__ import annotations

import functools
import math
import zlib
from pathlib import Path

from tests.chaos import work


def checksum(folder: Path, operation: work.Operation, run: int) -> int:
    """Of the payload of one experience as it was pushed, from the templates in a run's folder."""
    return zlib.crc32(_templates(folder).member(operation.task, operation.variant, run))


def advantages(operation: work.Operation) -> dict[int, float]:
    """The advantage of each member of a group by run: (reward - mean) / (deviation + 1e-6).

    Source: Shao et al. 2024 (GRPO), outcome supervision, with the sample deviation.
    """
    return _scores(operation.variant, tuple(operation.runs))


@functools.lru_cache(maxsize=4)
def _templates(folder: Path) -> work.Templates:
    return work.Templates(folder / "templates")


@functools.lru_cache(maxsize=1000)
def _scores(variant: int, runs: tuple[int, ...]) -> dict[int, float]:
    rewards = [work.reward(variant, run) for run in runs]
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((one - mean) ** 2 for one in rewards) / (len(rewards) - 1)
    scale = math.sqrt(variance) + 1e-6
    return {run: (one - mean) / scale for run, one in zip(runs, rewards, strict=True)}
