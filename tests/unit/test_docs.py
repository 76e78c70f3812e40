"""The pages: what they link and name exists, and what is said of their length holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "docker" / "README.md"))


def _outside_of_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _outside_of_code(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _outside_of_code(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_of_the_project_exist(page: Path) -> None:
    folders = "benchmarks|client|docker|examples|proto|scripts|server|tests"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text("utf-8"))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    missing = [
        page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name})" not in text
    ]
    assert not missing


def test_the_page_on_performance_can_be_read_at_once() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert text.count("\n") <= 250
