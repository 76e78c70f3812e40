"""The task: write a string of one to six digits backwards. Pure functions, no torch.

A problem is a tuple of digits. A tenth of the problems of full length, chosen by checksum, is held
out: no worker ever poses them, so that accuracy on them measures the rule, not memory. A blind
guess solves one in a million.
"""

from __future__ import annotations

import random
import zlib
from typing import TypeAlias

Problem: TypeAlias = tuple[int, ...]
"""Digits, each 0 to 9."""

NUM_DIGITS = 10
MAX_LENGTH = 6
SEPARATOR = NUM_DIGITS
"""Token between a problem and its answer."""
PADDING = NUM_DIGITS + 1
"""Token that fills a batch."""
VOCABULARY = NUM_DIGITS + 2
PROMPT_LENGTH = MAX_LENGTH + 1
"""Tokens of the longest prompt: its digits and the separator."""


def solution(problem: Problem) -> Problem:
    """Return the right answer."""
    return problem[::-1]


def reward(problem: Problem, response: Problem) -> float:
    """Return the fraction of positions that are right, 0 to 1."""
    right = sum(a == b for a, b in zip(solution(problem), response, strict=True))
    return right / len(problem)


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is for evaluation only."""
    return len(problem) == MAX_LENGTH and zlib.crc32(bytes(problem)) % 10 == 0


def training_problems(num_problems: int, *, generator: random.Random) -> list[Problem]:
    """Draw problems that aren't held out, all lengths alike; short ones teach the first steps."""
    problems: list[Problem] = []
    while len(problems) < num_problems:
        problem = _draw(generator.randint(1, MAX_LENGTH), generator)
        if not is_held_out(problem):
            problems.append(problem)
    return problems


def held_out_problems(num_problems: int, *, seed: int) -> list[Problem]:
    """Draw different held-out problems; the same ones for the same seed."""
    generator = random.Random(seed)
    problems: dict[Problem, None] = {}
    while len(problems) < num_problems:
        problem = _draw(MAX_LENGTH, generator)
        if is_held_out(problem):
            problems[problem] = None
    return list(problems)


def prompt_tokens(problem: Problem) -> list[int]:
    """Return the tokens that ask for the answer."""
    return [*problem, SEPARATOR]


def text(digits: Problem) -> str:
    """Write digits as people do."""
    return "".join(map(str, digits))


def _draw(length: int, generator: random.Random) -> Problem:
    return tuple(generator.randrange(NUM_DIGITS) for _ in range(length))
