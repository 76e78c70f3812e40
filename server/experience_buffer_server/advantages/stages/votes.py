"""Who votes in the statistics of a group, and sums over votes that no order changes.

Who speaks for a run was decided while packing; here its reward is looked up. Legend: B experiences,
G groups, V votes of all groups one after another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experience_buffer_server.advantages.arrays.batch import Batch
from experience_buffer_server.advantages.arrays.token_types import Floats, Ints
from experience_buffer_server.advantages.plan.parameters import RewardParameters


@dataclass(frozen=True, slots=True)
class Votes:
    """Numbers in groups. Statistics of a group depend on nothing but its numbers, not their order.

    Sums are correctly rounded (`math.fsum`), everything else is one operation per number.
    """

    values: Floats
    """Shape [V], finite."""
    offsets: Ints
    """Group g has the values `offsets[g]` to `offsets[g + 1]`, shape [G + 1]."""

    @property
    def sizes(self) -> Ints:
        """n: votes of each group, shape [G]."""
        sizes_G: Ints = np.diff(self.offsets)
        return sizes_G

    def spread(self, numbers_G: Floats) -> Floats:
        """Each vote its group's number, shape [V]."""
        numbers_V: Floats = np.repeat(numbers_G, self.sizes)
        return numbers_V

    def lists(self) -> list[list[float]]:
        """The votes of each group, length G."""
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[start:stop] for start, stop in itertools.pairwise(offsets)]

    def sums(self, numbers_V: Floats | Sequence[float] | None = None) -> Floats:
        """Sum of each group's votes, or of other numbers in their place, shape [G]."""
        numbers = self.values if numbers_V is None else numbers_V
        values = numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
        bounds = itertools.pairwise(self.offsets.tolist())
        return np.array([math.fsum(values[start:stop]) for start, stop in bounds])

    def maxima(self) -> Floats:
        """Largest vote of each group, shape [G]; 0 where there is none."""
        return self._extremes(np.maximum)

    def constant(self) -> NDArray[np.bool_]:
        """Whether all votes of a group are the same, shape [G]; so is a single one, and none."""
        same_G: NDArray[np.bool_] = self._extremes(np.maximum) == self._extremes(np.minimum)
        return same_G

    def means(self) -> Floats:
        """Mean of each group's votes, shape [G], exact where they are equal; 0 of none."""
        # A rounded sum divided by n need not give back what was added n times.
        means_G = self.sums() / np.maximum(self.sizes, 1)
        return np.where(self.constant(), self.maxima(), means_G)

    def stds(self, means_G: Floats, *, ddof: int) -> Floats:
        """Standard deviation of each group's votes around their mean, shape [G].

        Exactly 0 where all are equal, and where there are not more than `ddof`.
        """
        gaps_V = self.values - self.spread(means_G)
        return np.sqrt(self.sums(gaps_V * gaps_V) / np.maximum(self.sizes - ddof, 1))

    def _extremes(self, choose: np.ufunc) -> Floats:
        extremes_G = np.zeros(len(self.offsets) - 1)
        filled_G = self.sizes > 0
        if self.values.size:
            # Empty groups take no room, so the others lie one after another.
            extremes_G[filled_G] = choose.reduceat(self.values, self.offsets[:-1][filled_G])
        return extremes_G


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """Who votes in a launch, in the order of its groups."""

    voters: Ints
    """The experience behind each vote, ascending, shape [V]."""
    slots: Ints
    """Position of the vote of each experience's run, shape [B]."""
    offsets: Ints
    """Group g has votes `offsets[g]` to `offsets[g + 1]`, shape [G + 1]."""

    def votes(self, rewards_B: Floats) -> Votes:
        """What is voted, where the voters have these rewards."""
        return Votes(rewards_B[self.voters], self.offsets)


def votes_of_runs(batch: Batch, parameters: RewardParameters) -> Ballot:
    """A run votes with its reward at its highest step.

    Where rewards are returns over a run's steps (`turn_rewards` is `steps`), the run's whole
    return votes, which is the one at its first step.
    """
    return ballot(batch, batch.first_steps if steps_differ(parameters) else batch.voters)


def ballot(batch: Batch, voters_B: Ints) -> Ballot:
    """The votes where each experience is spoken for by the given one of its group, shape [B]."""
    voters_V, slots_B = np.unique(voters_B, return_inverse=True)
    return Ballot(
        voters=voters_V,
        slots=slots_B,
        offsets=np.searchsorted(voters_V, batch.group_offsets).astype(np.int64),
    )


def steps_differ(parameters: RewardParameters) -> bool:
    """Whether each step of a run has a reward of its own to be compared."""
    return parameters.turn_rewards == "steps"


def zero_variance(votes: Votes) -> NDArray[np.bool_]:
    """Whether a group has several votes and they are all the same, shape [G]."""
    return votes.constant() & (votes.sizes > 1)
