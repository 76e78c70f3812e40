from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experience_buffer_server.sampling.ranks import split
from tests.unit.work import counted_lines

TOKENS = st.lists(st.integers(0, 50) | st.integers(0, 40_000), max_size=70)


def sums(tokens: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(tokens[index] for index in part) for part in parts]


@given(TOKENS, st.integers(1, 17))
def test_each_unit_goes_to_one_rank_and_counts_are_even(tokens: list[int], world_size: int) -> None:
    parts = split(tokens, world_size)
    assert len(parts) == world_size
    assert sorted(index for part in parts for index in part) == list(range(len(tokens)))
    assert all(part == sorted(part) for part in parts)
    assert {len(part) for part in parts} <= {
        len(tokens) // world_size,
        -(-len(tokens) // world_size),
    }
    assert parts == split(tuple(tokens), world_size)


@given(TOKENS, st.integers(1, 17))
@example([10, *[1] * 11], 2)
@example([9, 9, 9, 1, 1], 2)
def test_ranks_differ_by_no_more_than_one_unit(tokens: list[int], world_size: int) -> None:
    totals = sums(tokens, split(tokens, world_size))
    spread = max(totals) - min(totals)
    if len(tokens) % world_size == 0 and tokens:
        assert spread <= max(tokens) - min(tokens)
    else:
        assert spread <= max(tokens, default=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_swap_with_the_heaviest_rank_would_help(world_size: int) -> None:
    rng = random.Random(world_size)
    for _ in range(500):
        tokens = [int(rng.lognormvariate(3, 1)) for _ in range(rng.randint(2, 13))]
        check_swaps(tokens, split(tokens, world_size))


def check_swaps(tokens: list[int], parts: list[list[int]]) -> None:
    totals = sums(tokens, parts)
    heavy = max(range(len(parts)), key=lambda rank: (totals[rank], rank))
    for light in range(len(parts)):
        gap = totals[heavy] - totals[light]
        for given_away in parts[heavy]:
            for taken in parts[light]:
                assert abs(gap - 2 * (tokens[given_away] - tokens[taken])) >= gap, tokens
            if len(parts[heavy]) > len(parts[light]):
                assert abs(gap - 2 * tokens[given_away]) >= gap, tokens


@pytest.mark.parametrize(
    ("tokens", "world_size", "parts"),
    [
        ([], 3, [[], [], []]),
        ([7], 2, [[0], []]),
        ([5, 5, 5], 5, [[0], [1], [2], [], []]),
        ([2, 3, 5, 7], 1, [[0, 1, 2, 3]]),
        ([2, 3, 5, 7], 2, [[0, 3], [1, 2]]),
        ([7, 7, 7, 7], 2, [[0, 2], [1, 3]]),
        # Dealt out as 40 + 1 and 20 + 20; a rank may have one unit more, not two.
        ([40, 20, 20, 1, 1], 2, [[0, 3], [1, 2, 4]]),
        # Dealt out as 8 + 5 + 4 and 7 + 6 + 3: a swap of 4 and 3 leaves the gap as it is.
        ([8, 7, 6, 5, 4, 3], 2, [[0, 3, 4], [1, 2, 5]]),
        # Dealt out as 10 + 5 + 1 and 6 + 5 + 1: a swap of 10 and 6 leaves the gap as it is.
        ([10, 6, 5, 5, 1, 1], 2, [[0, 3, 5], [1, 2, 4]]),
        # Dealt out as 9 + 5 + 4 and 8 + 6 + 0, which swap 9 and 6.
        ([9, 8, 6, 5, 4, 0], 2, [[2, 3, 4], [0, 1, 5]]),
        # Dealt out as 5 + 4 + 2 and 4 + 4, of which the first would get lighter than the second.
        ([5, 4, 4, 4, 2], 2, [[0, 3], [1, 2, 4]]),
        # The first has more than the third, and yet may not give it the last: 2 units each.
        ([100, 50, 49, 40, 39, 8, 8], 3, [[0, 6], [1, 4, 5], [2, 3]]),
    ],
)
def test_vectors(tokens: list[int], world_size: int, parts: list[list[int]]) -> None:
    assert split(tokens, world_size) == parts


def test_it_is_close_to_the_best_split() -> None:
    rng = random.Random(11)
    for _ in range(50):
        tokens = [int(rng.lognormvariate(6, 1)) for _ in range(12)]
        best = min(
            max(sum(tokens[i] for i in chosen), sum(tokens) - sum(tokens[i] for i in chosen))
            for chosen in combinations(range(12), 6)
        )
        assert max(sums(tokens, split(tokens, 2))) <= best * 1.05


def test_a_large_batch_of_long_tails_is_even() -> None:
    rng = random.Random(13)
    tokens = [min(int(rng.lognormvariate(8, 1)), 32_768) for _ in range(8_192)]
    totals = sums(tokens, split(tokens, 64))
    assert max(totals) - min(totals) <= 0.001 * max(totals)


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size is 0; give at least 1"):
        split([1, 2], 0)


@pytest.mark.parametrize("world_size", [2048, 4096, 8192])
def test_many_ranks_take_no_more_work_than_few(world_size: int) -> None:
    rng = random.Random(17)
    tokens = [rng.randrange(100, 8000) for _ in range(8_192)]
    with counted_lines() as lines:
        parts = split(tokens, world_size)
    assert lines.num < 150 * len(tokens)
    totals = sums(tokens, parts)
    assert max(totals) <= sum(tokens) / world_size * (1.01 if world_size < 4096 else 3)
