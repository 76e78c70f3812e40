"""Micro-batches of bounded length. Pure arithmetic, no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from experience_buffer._arguments import check_whole

__all__ = ["split"]


def split(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Put experiences into few micro-batches of at most `token_budget` tokens each.

    Best-fit decreasing: the longest first, each into the micro-batch that it fills best, or into a
    new one. That takes at most 11/9 of the fewest possible, and one (Johnson et al. 1974). What is
    longer than the budget is a micro-batch of its own. The same lengths always give the same split.

    Args:
        lengths: Tokens of each experience, none negative.
        token_budget: Most tokens of a micro-batch, at least 1.

    Returns:
        Indices of each micro-batch's experiences, ascending: together each index once. The one
        with the longest experience comes first, so that too high a budget shows at once.

    Raises:
        InvalidRequestError: `token_budget` is less than 1.
    """
    check(token_budget)
    micro_batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Tokens that still fit and number of each micro-batch, ascending."""
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, number = room.pop(place)
        else:
            left, number = token_budget, len(micro_batches)
            micro_batches.append([])
        micro_batches[number].append(index)
        insort(room, (left - length, number))
    return [sorted(indices) for indices in micro_batches]


def check(token_budget: int) -> None:
    """Check a budget.

    Raises:
        InvalidRequestError: It is no whole number, or less than 1.
    """
    hint = ", best the length of the longest experience or more"
    check_whole("token_budget", token_budget, least=1, hint=hint)
