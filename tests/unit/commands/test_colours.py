"""One scale of colours around zero, that of the page: symmetric, and a sign is always seen."""

from __future__ import annotations

import itertools
import math

import pytest

from experience_buffer_server.commands.colours import diverging, improbable


def parts(style: str) -> tuple[int, int, int]:
    """Red, green and blue of a background."""
    colour = style.rpartition("#")[2]
    red, green, blue = (int(colour[at : at + 2], 16) for at in (0, 2, 4))
    return red, green, blue


def test_zero_is_white_below_it_is_blue_and_above_orange() -> None:
    assert len(set(parts(diverging(0.0)))) == 1
    red, _, blue = parts(diverging(1.0))
    assert red > blue
    red, _, blue = parts(diverging(-1.0))
    assert blue > red


def test_the_further_from_zero_the_more_colour_until_it_is_full() -> None:
    blues = [parts(diverging(value))[2] for value in (0.0, 1e-9, 0.1, 0.5, 1.0, 3.0, 1e9, math.inf)]
    assert all(first >= second for first, second in itertools.pairwise(blues))
    assert blues[0] > blues[1], "the smallest has a colour, too"
    assert blues[5] == blues[6] == blues[7]


@pytest.mark.parametrize("value", [None, math.nan])
def test_what_is_no_number_has_no_colour(value: float | None) -> None:
    assert diverging(value) == improbable(value) == ""


def test_black_text_on_any_of_them_has_contrast_enough() -> None:
    for value in (-9.0, -1.0, -0.1, 0.0, 0.1, 1.0, 9.0):
        for style in (diverging(value), improbable(value)):
            linear = [
                each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
                for each in (part / 255 for part in parts(style))
            ]
            light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
            assert (light + 0.05) / 0.05 >= 4.5


def test_the_less_probable_the_more_colour() -> None:
    blues = [parts(improbable(value))[2] for value in (0.0, -0.01, -1.0, -10.0, -1e9)]
    assert all(first >= second for first, second in itertools.pairwise(blues))
    assert blues[-2] == blues[-1]
