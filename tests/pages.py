"""The fenced blocks of the documentation's pages, and which of them are run, where, or why not.

What a block is called says what becomes of it: `python` is run, whole or as a session; `console` is
run, `$` by `$`, and what it prints compared; `toml` is loaded; `sh` is checked: its commands and their
options exist; `text`, and other kinds, are to be looked at. A `title="..."` names a file: the block is
saved under it before what follows, and one of a file of the project is the same as that file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker" / "README.md"),
)
RUN_BY: Final = {
    "README.md": "integration/test_readme.py",
    "access.md": "integration/test_access_docs.py",
    "advantages.md": "unit/advantages/test_docs.py",
    "client.md": "integration/test_client_docs.py",
    "datasets.md": "integration/test_datasets_docs.py",
    "delivery.md": "integration/test_delivery_docs.py",
    "estimators.md": "unit/advantages/test_docs.py",
    "experiences.md": "unit/client/test_experiences_docs.py",
    "packed.md": "unit/client/packed/test_packed.py",
    "snapshots.md": "integration/test_snapshot_docs.py",
}
"""Pages with a test of their own, which looks at more than what they print. All others are followed from
top to bottom by tests/integration/test_pages.py."""
NOT_RUN: Final = {
    "docker": "needs docker, and makes images",
    "python3 -m venv": "makes an environment: it is what `make` has done where tests run",
    "pip": "asks a package index",
    ".": "changes the reader's shell",
    "umask": "changes the reader's shell",
}
"""Of blocks of `sh`, what nobody checks, and why."""
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    kind: str
    title: str
    """The file that it is saved as; empty: none."""
    text: str
    line: int
    """Of the page, from 1."""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, from top to bottom."""
    text = page.read_text("utf-8")
    found = [
        Block(
            kind=match[1],
            title=match[2] or "",
            text=match[3],
            line=text.count("\n", 0, match.start()) + 1,
        )
        for match in _FENCE.finditer(text)
    ]
    fences = len(re.findall(r"^```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{page.name}: a fence that isn't understood"
    return found


def named(page: Path) -> str:
    """What a page is called here: its path in docs/, or else in the project."""
    base = ROOT / "docs"
    return str(page.relative_to(base if page.is_relative_to(base) else ROOT))


def followed() -> list[Path]:
    """The pages that are followed from top to bottom."""
    return [
        page
        for page in PAGES
        if named(page) not in RUN_BY
        and any(block.kind in ("python", "console") for block in blocks(page))
    ]
