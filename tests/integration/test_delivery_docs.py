"""What docs/delivery.md shows happens, on a real server."""

from __future__ import annotations

import re
from typing import get_args

from experience_buffer_server.buffer.delivery.batch_picking import WaitLabel
from experience_buffer_server.settings.consumer import SelectorSettings
from tests.integration.pages import DOCS, run_examples
from tests.integration.server import Server

_PAGE = DOCS / "delivery.md"
_TEXT = _PAGE.read_text(encoding="utf-8")


def test_the_examples_do_what_the_page_says(shared_server: Server) -> None:
    assert run_examples(_PAGE, shared_server.address) > 40


def test_every_selector_and_every_reason_is_explained() -> None:
    kinds = get_args(SelectorSettings.model_fields["kind"].annotation)
    assert set(kinds) <= _first_cells("selector")
    # A call also waits for fresh units, and for those that came before it.
    assert _first_cells("reason") == {label for label in get_args(WaitLabel) if label} | {
        "fresh",
        "line",
    }


def _first_cells(heading: str) -> set[str]:
    """What the first column of a table names, each in backquotes."""
    table = re.search(rf"^\| `?{heading}`? \|.*\n\|[-|]+\n((?:\|.*\n)+)", _TEXT, re.MULTILINE)
    assert table
    cells = [row.split("|")[1] for row in table[1].splitlines()]
    return {name.strip('"') for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
