"""Texts of rollouts do nothing to a terminal, and tables fit into it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from experience_buffer_server.commands import terminal

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x08\x9b31m\u202eevil\u2066\u200b[bold red]x[/] \x00\U000e0041"


def shown(renderable: object, width: int = 80) -> str:
    made = io.StringIO()
    Console(file=made, width=width, force_terminal=False, markup=False).print(renderable)
    return made.getvalue()


def test_what_moves_a_cursor_or_turns_a_text_around_is_written_out() -> None:
    cleaned = terminal.clean(HOSTILE)
    assert cleaned.isprintable()
    assert "\\x1b]0;title\\x07\\x1b[2J" in cleaned
    assert "\\u202eevil\\u2066" in cleaned
    assert "[bold red]x[/]" in cleaned, "no markup is taken for a style"


def test_lines_stay_where_they_are_asked_for_and_nothing_else_does() -> None:
    assert terminal.clean("a\n\tb\r\nc", lines=True) == "a\n    b\nc"
    assert terminal.clean("a\n\tb") == "a b"
    assert terminal.clean("x\x85\x1b", lines=True) == "x\n\\x1b"


def test_a_long_text_is_cut_before_anything_else_is_done() -> None:
    assert len(terminal.clean("\x1b" * 10_000_000)) == 4 * 199 + 1
    assert terminal.clean("y" * 300, most_chars=10) == "y" * 9 + "…"


def test_cells_of_a_table_are_cleaned_and_numbers_stand_to_the_right() -> None:
    made = terminal.table("name", ">count", rows=[(HOSTILE, 1234567), ("b", None)])
    text = shown(made, 200)
    assert "\x1b" not in text
    assert "\u202e" not in text
    first, second, _ = text.splitlines()
    assert first.rstrip().endswith("    count")
    assert second.rstrip().endswith("1,234,567")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_table_is_never_wider_than_the_terminal(width: int) -> None:
    rows = [("k" * 30, "w" * 500, 12345)]
    text = shown(terminal.table("!key", "words", ">count", rows=rows), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) == 2, "no cell is wrapped"


def test_times_are_told_as_people_say_them() -> None:
    assert terminal.ago(100.0, 141.0) == "41 s"
    assert terminal.ago(None) == ""
    assert terminal.ago(200.0, 100.0) == "0 s", "clocks differ"
    assert terminal.until(200.0, 100.0) == "in 1 min 40 s"
    assert terminal.until(100.0, 141.0) == "41 s over"


def test_a_text_that_has_a_style_is_left_as_it_is() -> None:
    text = Text("ok", style="green")
    assert terminal.cell(text) is text
    assert terminal.cell(True).plain == "yes"
    assert terminal.cell(0.12345).plain == "0.1235"


def test_words_stand_below_their_row_where_there_is_no_room_beside_it() -> None:
    rows = [("0/1", 3, "because " * 12), ("0/2", 4, None)]
    for width, num_lines in ((60, 5), (160, 3)):
        console = Console(file=io.StringIO(), width=width)
        made = terminal.noted(console, "!group", ">has", "~why", rows=rows, styles=["dim"])
        lines = shown(made, width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) == num_lines
        assert lines[0].split()[:2] == ["group", "has"]
        assert lines[-1].split() == ["0/2", "4"]
