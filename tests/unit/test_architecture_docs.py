"""docs/architecture.md names files that exist, every room, and ways that are as long as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_layout import BUFFER_ROOMS, SERVER_ROOMS

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server" / "experience_buffer_server"
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MOST_FILES = 25


def _below(heading: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    level = heading.split()[0]
    (found,) = re.findall(
        rf"^{re.escape(heading)}\n(.+?)(?=^#{{1,{len(level)}}} |\Z)", TEXT, re.DOTALL | re.MULTILINE
    )
    return str(found)


def test_every_path_exists() -> None:
    quoted = re.findall(r"`([\w./-]+)`", TEXT)
    paths = [text for text in quoted if "/" in text.strip("/") or text.endswith((".py", "/"))]
    assert len(paths) > 60
    where = (ROOT, SERVER, ROOT / "client" / "experience_buffer")
    missing = [path for path in paths if not any((base / path).exists() for base in where)]
    missing = [path for path in missing if path not in ("/metrics",)]
    assert not missing


def test_every_room_is_in_the_picture_from_the_top_down() -> None:
    (picture,) = re.findall(r"^```\n(.+?)^```", _below("## The rooms"), re.DOTALL | re.MULTILINE)
    # A name stands to the left of what is said of it.
    named = re.findall(r"\w+", " ".join(line[:23] for line in picture.splitlines()))
    assert [name for name in named if name in SERVER_ROOMS] == list(SERVER_ROOMS)
    assert [name for name in named if name in BUFFER_ROOMS] == list(BUFFER_ROOMS)


@pytest.mark.parametrize(
    "way", ["From Push to the submitted commit", "From the commit to Sample on the wire"]
)
def test_a_way_is_numbered_and_enters_no_file_twice(way: str) -> None:
    steps = re.findall(r"^(\d+)\. `([\w./]+\.py)`: .+", _below(f"### {way}"), re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    files = [path for _, path in steps]
    assert len(files) == len(set(files))
    assert 10 < len(files) <= MOST_FILES


def test_the_page_can_be_read_at_once() -> None:
    assert TEXT.count("\n") <= 280
