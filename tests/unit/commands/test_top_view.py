"""A screen of a server's state at any size, and greyed where the server is lost."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from experience_buffer import Stats
from experience_buffer_server.commands.top_view import Screen
from tests.unit.client.test_advice import BUFFER, CONSUMER, WAITS

NOW = 1_790_000_000.0
HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]\u202e"
BUFFERS = tuple(
    dataclasses.replace(
        BUFFER,
        name=f"buffer-{number}",
        num_items=1_234_567,
        consumers=(
            dataclasses.replace(CONSUMER, **WAITS),
            dataclasses.replace(CONSUMER, name="eval"),
        ),
    )
    for number in range(4)
)
STATS = Stats(buffers=BUFFERS, server_version="1.0", uptime_seconds=61.0)


def drawn(screen: Screen, width: int, height: int = 30, *, color: bool = False) -> str:
    made = io.StringIO()
    console = Console(
        file=made, width=width, height=height, force_terminal=color, markup=False,
        color_system="truecolor" if color else None,
    )  # fmt: skip
    console.print(screen.draw(width, height, NOW))
    return made.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 100, 160, 240])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    shown = drawn(Screen("127.0.0.1:50051", stats=STATS, read_time=NOW), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "buffer-0" in shown


def test_the_sentences_come_first_and_leave_room_for_the_tables() -> None:
    shown = drawn(Screen("127.0.0.1:50051", stats=STATS, read_time=NOW), 100, 24)
    lines = shown.splitlines()
    assert lines[2].startswith("! consumer trainer of buffer-0 waits: 3 ready of 8 groups")
    assert "... 2 more: see experience-buffer why" in shown
    assert "1,234,567" in shown
    assert len([line for line in lines if "/trainer" in line or "/eval" in line]) == 8


def test_before_the_first_answer_it_says_that_there_is_none() -> None:
    shown = drawn(Screen("127.0.0.1:1", lost="nobody listens there"), 80)
    assert "no server: nobody listens there" in shown


def test_a_lost_servers_last_state_is_greyed_with_since_when() -> None:
    screen = Screen("127.0.0.1:1", stats=STATS, read_time=NOW - 65, lost=f"gone {HOSTILE}")
    shown = drawn(screen, 100)
    assert "lost since 1 min 5 s" in shown
    assert "buffer-0" in shown
    assert "\x1b" not in shown
    grey = drawn(screen, 100, color=True)
    live = drawn(dataclasses.replace(screen, lost=""), 100, color=True)
    of_buffers = [
        next(row for row in text.splitlines() if "1,234,567" in row) for text in (grey, live)
    ]
    assert of_buffers[0].startswith("\x1b[2m")
    assert not of_buffers[1].startswith("\x1b")
