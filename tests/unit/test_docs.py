"""The pages: what they link, name and tell to run exists, and what is said of their length holds.

That examples do what the pages say is tested page by page, which `RUN_BY` names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import experience_buffer
from experience_buffer import Batch, Client, SampleStream, Writer, collation
from experience_buffer.dataset import ExperienceDataset
from experience_buffer.packed import PackedBatch
from experience_buffer_server.commands import cli
from experience_buffer_server.settings.server import load_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker" / "README.md"))
RUN_BY = {
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
"""Which test runs the Python of a page."""


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Kind and text of the page's blocks of code."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [(kind, text) for kind, text in found]


def _commands() -> Iterator[tuple[str, set[str]]]:
    """Every command of the command line with its options."""
    pending = [("", typer.main.get_command(cli.app))]
    while pending:
        name, found = pending.pop()
        inner = getattr(found, "commands", {})
        pending += [(f"{name} {key}".strip(), value) for key, value in inner.items()]
        if not inner:
            yield name, {option for one in found.params for option in one.opts}


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


def test_every_example_in_python_is_run() -> None:
    shown = {
        page.name for page in PAGES if any(kind in ("python", "pycon") for kind, _ in _blocks(page))
    }
    assert shown == RUN_BY.keys()
    for name, test in RUN_BY.items():
        assert f'"{name}"' in (ROOT / "tests" / test).read_text("utf-8"), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_configuration_loads(page: Path, tmp_path: Path) -> None:
    configurations = [text for kind, text in _blocks(page) if kind == "toml"]
    # An access file is no configuration: `test_access_docs.py` reads it.
    for text in (text for text in configurations if "[[grants]]" not in text):
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        load_settings(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    commands = dict(_commands())
    assert {"serve", "health", "token list"} <= commands.keys()
    text = page.read_text("utf-8")
    # Inline, or a line of a block; not the name of the project within a sentence.
    shown = re.findall(r"`experience-buffer ([a-z][^`\n]*)", text)
    blocks = "".join(code for _, code in _blocks(page))
    shown += re.findall(r"(?<![\w.-])(?:[.\w]*/)*experience-buffer ([a-z]+\b(?!:).*)", blocks)
    for line in shown:
        groups = {name.split()[0] for name in commands}
        assert line.split()[0] in groups, f"{page.name}: experience-buffer {line}"
        if line.split()[0] in groups - commands.keys() and len(line.split()) == 1:
            continue
        name = max((one for one in commands if line.startswith(one)), key=len)
        options = set(re.findall(r"--[a-z][a-z-]*", line))
        assert options <= commands[name], f"{page.name}: experience-buffer {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_calls_within_sentences_name_arguments_that_exist(page: Path) -> None:
    for code in re.findall(r"`([^`]+)`", _outside_of_code(page)):
        try:
            tree = ast.parse(re.sub(r",? ?\.\.\.,?", "", " ".join(code.split())))
        except SyntaxError:
            continue  # A file, a metric, TOML: no Python.
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else None
            name = call.func.id if isinstance(call.func, ast.Name) else name
            given = {keyword.arg for keyword in call.keywords if keyword.arg}
            takes = _arguments(name or "")
            assert not takes or any(given <= names for names in takes), f"{page.name}: {code}"


def _arguments(name: str) -> list[set[str]]:
    """The arguments of everything public of that name that has any; none where there is no such thing."""
    owners = (Client, Batch, Writer, SampleStream, ExperienceDataset, PackedBatch)
    places = (experience_buffer, collation, *owners)
    found = [getattr(place, name) for place in places if name and hasattr(place, name)]
    return [set(inspect.signature(each).parameters) for each in found if callable(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    shown = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text("utf-8"), re.MULTILINE)
    assert set(shown) <= targets


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    missing = [
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if f"{page.relative_to(ROOT)})" not in text
    ]
    assert not missing


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """Add it to `nav` in mkdocs.yml, where a reader would look for it."""
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_list_within_a_list_is_indented_by_four(page: Path) -> None:
    """With fewer the site makes one list of both, unlike code hosts."""
    assert not re.findall(r"^ {2,3}(?:-|\d+\.) .*", _outside_of_code(page), re.MULTILINE)


def test_the_page_on_performance_can_be_read_at_once() -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert text.count("\n") <= 250
