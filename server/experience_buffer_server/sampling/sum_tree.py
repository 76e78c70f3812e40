"""Weights in slots 0, 1, 2, ... and the sums over them, for draws in proportion to weight."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

FAN_OUT = 16
"""Children of one inner node; a node is summed at once, so a flat tree beats a binary one."""


class SumTree:
    """Non-negative finite weights, whose total must be finite too. Not thread-safe.

    `levels[0]` holds the weights, each level above the sums of `FAN_OUT` neighbours below, up to a
    level of at most `FAN_OUT`. Changes are summed up when a sum is next asked for, once for all of
    them. A sum is taken anew from its children and never moved by a difference: nothing drifts.
    """

    def __init__(self) -> None:
        self._levels = [array("d")]
        self._stale: set[int] = set()
        """Nodes above the weights whose children have changed."""

    def __len__(self) -> int:
        return len(self._levels[0])

    def __getitem__(self, slot: int) -> float:
        return self._levels[0][slot]

    def __setitem__(self, slot: int, weight: float) -> None:
        self._levels[0][slot] = weight
        self._stale.add(slot // FAN_OUT)

    @property
    def total(self) -> float:
        """Sum of all weights; 0.0 when empty, and otherwise only when all of them are 0."""
        self._sum_up()
        return sum(self._levels[-1], 0.0)

    def append(self, weight: float) -> None:
        """Add a slot at the end."""
        weights = self._levels[0]
        self._stale.add(len(weights) // FAN_OUT)
        weights.append(weight)

    def pop(self) -> float:
        """Remove the last slot and return its weight; IndexError when empty."""
        weights = self._levels[0]
        weight = weights.pop()
        self._stale.add(len(weights) // FAN_OUT)
        return weight

    def find(self, point: float) -> int:
        """The slot whose share of [0, total) holds the point; never one of weight 0.

        Needs a total above 0. A point that rounding puts past the end counts as the end.
        """
        self._sum_up()
        node = 0
        for level in reversed(self._levels):
            begin = node * FAN_OUT
            for node, weight in enumerate(level[begin : begin + FAN_OUT], begin):  # noqa: B007
                if point < weight:
                    break
                point -= weight
            else:
                # Past the end, here and below. A sum above 0 has a child above 0: the last such.
                point = math.inf
                while level[node] == 0.0:
                    node -= 1
        return node

    def _sum_up(self) -> None:
        """Take the sums above all changes anew, and fit the levels to the number of weights."""
        if not self._stale:
            return
        stale: Iterable[int] = self._stale
        levels = self._levels
        below, depth = levels[0], 1
        while len(below) > FAN_OUT:
            num_nodes = (len(below) + FAN_OUT - 1) // FAN_OUT
            if depth == len(levels):
                levels.append(array("d"))
                stale = range(num_nodes)
            above = levels[depth]
            if len(above) != num_nodes:
                del above[num_nodes:]
                above.extend([0.0] * (num_nodes - len(above)))
            for node in stale:
                # A node that has lost its last child is gone; only those above it remain to do.
                if node < num_nodes:
                    above[node] = sum(below[node * FAN_OUT : node * FAN_OUT + FAN_OUT])
            stale = {node // FAN_OUT for node in stale}
            below, depth = above, depth + 1
        del levels[depth:]
        self._stale.clear()
