"""What docs/delivery.md shows happens, on a real server."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import get_args

from experience_buffer_server.buffer.delivery.batch_picking import WaitLabel
from experience_buffer_server.settings.consumer import SelectorSettings
from tests.integration.server import Server

_PAGE = Path(__file__).parents[2] / "docs" / "delivery.md"
_TEXT = _PAGE.read_text(encoding="utf-8")


def test_the_examples_do_what_the_page_says(shared_server: Server) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL))
    assert "127.0.0.1:50051" in code
    code = code.replace("127.0.0.1:50051", shared_server.address)
    examples = doctest.DocTestParser().get_doctest(code, {}, _PAGE.name, str(_PAGE), 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    try:
        failed = runner.run(examples, out=report.append, clear_globs=False).failed
    finally:
        if "client" in examples.globs:
            examples.globs["client"].close()
    assert not failed, "".join(report)
    assert len(examples.examples) > 40


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
