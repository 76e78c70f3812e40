"""What was there to learn from, counted for good, for Prometheus: rewards, lengths, groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Solved: TypeAlias = Literal["all", "some", "none"]
"""How many of a group's rewards are above 0."""

REWARD_LIMITS: Final = (
    *(-10.0, -5.0, -2.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0),
)
LENGTH_LIMITS: Final = (
    *(16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0),
)


class Buckets:
    """A classic histogram of Prometheus': counts up to each limit. Not thread-safe."""

    __slots__ = ("_counts", "_limits", "total")

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = np.array(limits)
        self._counts: NDArray[np.int64] = np.zeros(len(limits) + 1, np.int64)
        self.total = 0.0
        """Of all values."""

    def add(self, values: NDArray[np.float64]) -> None:
        """Count values, shape [N], all finite."""
        if len(values):
            places = np.searchsorted(self._limits, values)
            self._counts += np.bincount(places, minlength=len(self._counts))
            self.total += float(values.sum())

    def cumulative(self) -> list[tuple[str, float]]:
        """Limit, as a label, and how many values are at most that, ascending; the last is +Inf."""
        names = [*(f"{limit:g}" for limit in self._limits.tolist()), "+Inf"]
        return list(zip(names, map(float, np.cumsum(self._counts).tolist()), strict=True))


class Learning:
    """Counts of one buffer since the server started. Not thread-safe."""

    def __init__(self) -> None:
        self.rewards = Buckets(REWARD_LIMITS)
        self.response_tokens = Buckets(LENGTH_LIMITS)
        self.num_rewarded = 0
        """Experiences that have got a reward, when they were pushed or later."""
        self.num_solved = 0
        """Of these, those whose reward is above 0."""
        self.groups: dict[Solved, int] = {"all": 0, "some": 0, "none": 0}
        """Groups that became whole with at least two rewards."""
        self.num_zero_variance_groups = 0
        """Of these, those all of whose rewards are equal."""

    def pushed(self, lengths: NDArray[np.float64]) -> None:
        """Experiences came, of these lengths, shape [N]."""
        self.response_tokens.add(lengths)

    def rewarded(self, rewards: NDArray[np.float64]) -> None:
        """Rewards came, with their experiences or later, shape [R]."""
        self.rewards.add(rewards)
        self.num_rewarded += len(rewards)
        self.num_solved += int(np.count_nonzero(rewards > 0))

    def completed(self, rewards: Sequence[float]) -> bool:
        """A group with at least two rewards became whole: whether they are all equal."""
        num_solved = sum(reward > 0 for reward in rewards)
        self.groups[
            "none" if not num_solved else "all" if num_solved == len(rewards) else "some"
        ] += 1
        is_zero_variance = min(rewards) == max(rewards)
        self.num_zero_variance_groups += is_zero_variance
        return is_zero_variance
