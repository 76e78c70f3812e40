"""One jointly leased batch, split among the ranks of a consumer. Pure arithmetic, no state."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

# Bound of the units looked at for swaps, in proportion: a few milliseconds for a thousand.
_LOOKS_PER_UNIT = 10
# A bound that small batches don't reach.
_MIN_LOOKS = 20_000


def split(tokens: Sequence[int], world_size: int) -> list[list[int]]:
    """Give each unit of a batch to one rank, so that all ranks have about as much to do.

    The counts of two ranks differ by at most one, and are equal where `world_size` divides the
    number of units: data-parallel trainers wait for each other at every step. With more ranks than
    units, some ranks get none. The same sequence always gives the same split.

    First each unit, largest first, goes to the rank with the fewest tokens that still has room
    (Graham 1969, longest processing time first, with a bound on the count). Then the rank with the
    most tokens swaps units with others as long as that evens them out. When no swap helps any
    more, the largest sum exceeds the smallest by no more than the largest unit has tokens. Time is
    in proportion to the units, but for sorting.

    Args:
        tokens: Tokens of each unit of the batch, none negative.
        world_size: Number of ranks, at least 1.

    Returns:
        For each rank the indices of its units, ascending.

    Raises:
        ValueError: `world_size` is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; give at least 1 rank")
    parts = _deal(tokens, world_size)
    # With one unit each, a swap would only change places.
    if 1 < world_size < len(tokens):
        _even_out(parts, tokens)
    return [sorted(index for index in part if index < len(tokens)) for part in parts]


def _deal(tokens: Sequence[int], world_size: int) -> list[list[int]]:
    """Largest first to the rank with the smallest sum, `room` slots for each rank.

    What is left of the slots is filled with blanks: indices from `len(tokens)` on, without tokens,
    at most one in each rank. With them a move of a unit to a rank that has one less is a swap.
    """
    parts: list[list[int]] = [[] for _ in range(world_size)]
    room, num_larger = divmod(len(tokens), world_size)
    ranks = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        while True:
            total, rank = heapq.heappop(ranks)
            if len(parts[rank]) < room or num_larger:
                break
        num_larger -= len(parts[rank]) == room
        parts[rank].append(index)
        if len(parts[rank]) <= room:
            heapq.heappush(ranks, (total + tokens[index], rank))
    blank = len(tokens)
    for part in parts:
        if len(part) == room and len(tokens) % world_size:
            part.append(blank)
            blank += 1
    return parts


def _even_out(parts: list[list[int]], tokens: Sequence[int]) -> None:
    """Swap units between the rank with the most tokens and others as long as it gains.

    Each swap brings the two sums closer, so that it ends; the bound keeps it cheap as well. The
    lightest ranks are tried first: of two swaps the one with the larger gap is worth more.
    """
    weights = [*tokens, *[0] * len(parts)]
    sums = [sum(weights[index] for index in part) for part in parts]
    by_sum = sorted(zip(sums, range(len(parts)), strict=True))
    looks = max(_LOOKS_PER_UNIT * len(tokens), _MIN_LOOKS)
    while True:
        most, heavy = by_sum.pop()
        for least, light in by_sum:
            looks -= len(parts[heavy]) + len(parts[light])
            if most - least <= 1 or looks < 0:
                return
            swap = _best_swap(parts[heavy], parts[light], weights, most - least, len(tokens))
            if swap is not None:
                break
        else:
            return
        given, taken = swap
        parts[heavy][parts[heavy].index(given)] = taken
        parts[light][parts[light].index(taken)] = given
        moved = weights[given] - weights[taken]
        del by_sum[bisect_left(by_sum, (least, light))]
        insort(by_sum, (most - moved, heavy))
        insort(by_sum, (least + moved, light))


def _best_swap(
    heavy: list[int], light: list[int], weights: list[int], gap: int, num_units: int
) -> tuple[int, int] | None:
    """The units of a heavier and a lighter rank whose swap evens them out most, if any does.

    A swap by d tokens turns the gap into |gap - 2 d|: it gains where 0 < d < gap, a gap above 1.
    """
    if max(heavy) >= num_units:
        # It has one unit less than others already.
        light = [index for index in light if index < num_units]
    light = sorted(light, key=lambda index: (weights[index], index))
    light_weights = [weights[index] for index in light]
    best: tuple[int, int] | None = None
    best_gap = gap
    for given in sorted(heavy):
        # The best partners are the two around the weight that would even the ranks out exactly.
        place = bisect_left(light_weights, weights[given] - gap / 2)
        for taken in light[max(place - 1, 0) : place + 1]:
            left = abs(gap - 2 * (weights[given] - weights[taken]))
            if left < best_gap:
                best, best_gap = (given, taken), left
    return best
