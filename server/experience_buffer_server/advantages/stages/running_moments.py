"""Moments of all scores that a buffer has computed, and normalisation by them.

Legend: B experiences, G groups.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats
from experience_buffer_server.advantages.arrays.values import GroupDetails
from experience_buffer_server.advantages.plan.parameters import RewardParameters

from .votes import Ballot, votes_of_runs


class RunningMoments:
    """Count, sum and sum of squares of all numbers so far, exact. Not thread-safe.

    A float is an integer over a power of two, so both sums are kept as integers, over `2^bits` and
    `2^(2 bits)` with bits grown to the finest number seen. So neither the order of the numbers, nor
    how they were divided into updates, nor a restart changes a bit of the mean or the deviation,
    both of which are correctly rounded.
    """

    def __init__(self) -> None:
        """Start with no numbers."""
        self._count = 0
        self._bits = 0
        self._sum = 0
        self._squares = 0

    @property
    def count(self) -> int:
        """How many numbers there were."""
        return self._count

    @property
    def mean(self) -> float:
        """Their mean; 0 of none."""
        return self._sum / (self._count << self._bits) if self._count else 0.0

    @property
    def std(self) -> float:
        """Their standard deviation with ddof 1, which is `sqrt(var N / (N - 1))`; what to divide by.

        It is 1 while it isn't defined, with fewer than two numbers, and while it is 0, with all
        numbers equal: scores then stay as they are. (LightRFT gives infinity and about 1e-12.)
        """
        if self._count < 2:
            return 1.0
        variance = self._count * self._squares - self._sum * self._sum
        scale = (self._count * (self._count - 1)) << (2 * self._bits)
        # A variance so small that its root rounds to 0 is none either.
        return _root(variance, scale) or 1.0

    def update(self, values: Iterable[float]) -> None:
        """Count more numbers, in any order.

        Raises:
            ValueError: One of them isn't finite; none was counted.
        """
        numbers = list(values)
        if not all(map(math.isfinite, numbers)):
            wrong = next(number for number in numbers if not math.isfinite(number))
            raise ValueError(f"running moments are of finite numbers, not {wrong!r}")
        ratios = [float(number).as_integer_ratio() for number in numbers]
        # A denominator 2^k has k + 1 bits.
        scaled = [(numerator, denominator.bit_length() - 1) for numerator, denominator in ratios]
        finer = max(max((bits for _, bits in scaled), default=0) - self._bits, 0)
        self._bits += finer
        self._sum <<= finer
        self._squares <<= 2 * finer
        whole = [numerator << (self._bits - bits) for numerator, bits in scaled]
        self._count += len(whole)
        self._sum += sum(whole)
        self._squares += sum([number * number for number in whole])

    def become(self, other: RunningMoments) -> None:
        """Take over the state of others."""
        self._count, self._bits = other._count, other._bits
        self._sum, self._squares = other._sum, other._squares

    def to_json(self) -> str:
        """The state as text; equal for equal numbers, in whatever order they came."""
        # Hexadecimal: the conversion to decimal digits is slow, and limited in length.
        return json.dumps(
            {
                "count": self._count,
                "bits": self._bits,
                "sum": hex(self._sum),
                "squares": hex(self._squares),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RunningMoments:
        """Bring back a state; `{}` is the one without numbers.

        Raises:
            ValueError: The text isn't one that `to_json` gives.
        """
        moments = cls()
        try:
            state = json.loads(text)
            if state == {}:
                return moments
            moments._count, moments._bits = int(state["count"]), int(state["bits"])
            moments._sum = int(state["sum"], 16)
            moments._squares = int(state["squares"], 16)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{text[:80]!r} isn't a state of running moments; give what `to_json` returned, or "
                "start with new ones"
            ) from error
        consistent = (
            moments._count >= 0
            and 0 <= moments._bits <= _MAX_BITS
            and moments._sum * moments._sum <= moments._count * moments._squares
        )
        if not consistent:
            raise ValueError(
                f"no numbers have the running moments {text[:80]!r}; give what `to_json` returned, "
                "or start with new ones"
            )
        return moments


_MAX_BITS = 1074
"""The finest float64 is 2^-1074."""


def normalise_by_moments(
    rewards_B: Floats,
    batch: Batch,
    parameters: RewardParameters,
    moments: RunningMoments | None,
    details: GroupDetails,
    *,
    counted: Sequence[bool] | None,
) -> Floats:
    """Divide scores by the standard deviation of all scores so far, their own included.

    `x / std`, or `(x - mean) / std`. The moments are updated by the votes of one group, then that
    group is normalised, then comes the next; where the plan takes statistics over a batch, by one
    statistics batch after another. So a group's result depends on the order in which groups are
    computed, as it has to, and not on which of them share a launch.

    A scalar that isn't used because there are token-level rewards has no vote and stays.

    Args:
        rewards_B: Scores, shape [B].
        batch: Groups in the order in which they are counted, and who votes.
        parameters: `running_norm`: whether, and whether after subtracting the mean.
        moments: The buffer's moments; they are updated. Not needed where none are used.
        details: Gets each group's `running_count`, `running_mean` and `running_std`.
        counted: Per group, False if its votes were counted before, by an earlier computation of
            the same group; None: none was.

    Returns:
        Scores, shape [B].

    Raises:
        ValueError: The parameters use running moments and none were given, or a vote isn't finite.

    Source: LightRFT, `RunningMoments` (Chan, Golub and LeVeque 1983).
    """
    if not parameters.uses_running_moments:
        return rewards_B
    if moments is None:
        raise ValueError(
            f"running_norm is {parameters.running_norm!r}, which needs the moments so far; give "
            "the buffer's, or new ones"
        )
    means_G, stds_G = np.zeros(len(details)), np.ones(len(details))
    used_B = ~batch.has_token_rewards
    groups = _used_votes(votes_of_runs(batch, parameters), rewards_B, used_B)
    for start, stop in _units(batch, whole_batches=parameters.uses_batch):
        for index in range(start, stop):
            if counted is None or counted[index]:
                moments.update(groups[index])
        means_G[start:stop], stds_G[start:stop] = mean, std = moments.mean, moments.std
        for recorded in details[start:stop]:
            recorded |= {
                "running_count": moments.count, "running_mean": mean, "running_std": std
            }  # fmt: skip
    sizes_G = np.diff(batch.group_offsets)
    centred_B = rewards_B
    if parameters.running_norm == "mean_std":
        centred_B = rewards_B - np.repeat(means_G, sizes_G)
    return np.where(used_B, centred_B / np.repeat(stds_G, sizes_G), rewards_B)


def _used_votes(ballot: Ballot, rewards_B: Floats, used_B: NDArray[np.bool_]) -> list[list[float]]:
    groups = ballot.votes(rewards_B).lists()
    if used_B.all():
        return groups
    flags = ballot.votes(used_B.astype(np.float64)).lists()
    return [
        [vote for vote, used in zip(votes, kept, strict=True) if used]
        for votes, kept in zip(groups, flags, strict=True)
    ]


def _units(batch: Batch, *, whole_batches: bool) -> list[tuple[int, int]]:
    """Which groups, from the first to before the last, are counted before they are normalised."""
    if whole_batches:
        edges = np.flatnonzero(np.diff(batch.batches, prepend=-1, append=-1)).tolist()
    else:
        edges = list(range(len(batch.group_offsets)))
    return list(itertools.pairwise(edges))


def _root(numerator: int, denominator: int) -> float:
    """Correctly rounded square root of a fraction that isn't negative, or the largest float."""
    if numerator == 0:
        return 0.0
    # An integer root of at least 64 bits; if it isn't exact its last bit is set, which tells the
    # division below, itself correctly rounded, on which side of a tie the true root lies.
    shift = max(0, 128 - numerator.bit_length() + denominator.bit_length())
    shift += shift % 2
    quotient, rest = divmod(numerator << shift, denominator)
    root = math.isqrt(quotient)
    if rest or root * root != quotient:
        root |= 1
    try:
        return root / (1 << (shift // 2))
    except OverflowError:
        return sys.float_info.max
