"""A computation in one line: the formula where its numbers give the advantage, else what was used."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer_server.commands.computation import computed

GRPO = {"estimator": "grpo", "mean": 0.5, "std": 0.57735, "votes": 4, "members": 4}


@pytest.mark.parametrize(
    ("used", "reward", "advantage", "line"),
    [
        (GRPO, 1.0, 0.866, "grpo: (1 - mean 0.50) / (std 0.58 + 1e-06) = 0.87; 4 votes, 0 masked"),
        (
            GRPO,
            0.0,
            -0.866,
            "grpo: (0 - mean 0.50) / (std 0.58 + 1e-06) = -0.87; 4 votes, 0 masked",
        ),
        (
            {"estimator": "rloo", "mean": 0.5, "votes": 4},
            *(0.0, -2 / 3),
            "rloo: 0 - mean of the others 0.67 = -0.67; 4 votes, 0 masked",
        ),
        (
            {"estimator": "opmd", "mean": 0.5, "votes": 4},
            *(1.0, 0.5),
            "opmd: 1 - mean 0.50 = 0.50; 4 votes, 0 masked",
        ),
        # Numbers that don't give the advantage are shown, and no formula is made up.
        (GRPO, 1.0, 5.0, "grpo: mean 0.5, std 0.5774, advantage 5; 4 votes, 0 masked"),
        ({"estimator": "gae", "members": 1}, 1.0, None, "gae; 1 member, 0 masked"),
        ({"estimator": "x", "mean": "NaN"}, 1.0, 1.0, "x: advantage 1; 0 masked"),
        (
            {**GRPO, "zero_variance": True, "masked": True},
            *(None, None),
            "grpo: mean 0.5, std 0.5774; 4 votes, 0 masked; zero variance; masked",
        ),
    ],
)
def test_it_says_the_numbers_that_were_used(
    used: dict[str, Any], reward: float | None, advantage: float | None, line: str
) -> None:
    assert computed(used, reward=reward, advantage=advantage, num_masked=0) == line
