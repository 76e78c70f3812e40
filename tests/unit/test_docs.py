"""The pages: what they link, name and tell to run exists, and what is said of their length holds.

That examples do what the pages say is tested page by page, which `RUN_BY` names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import experience_buffer
from experience_buffer import Batch, Client, SampleStream, Writer, collation
from experience_buffer.dataset import ExperienceDataset
from experience_buffer.looking import Where
from experience_buffer.packed import PackedBatch
from experience_buffer_server.commands import cli
from experience_buffer_server.settings.server import load_settings
from tests.pages import NOT_RUN, PAGES, RUN_BY, blocks, followed, named

ROOT = Path(__file__).parents[2]


def _commands() -> Iterator[tuple[str, set[str]]]:
    """Every command of the command line with its options."""
    pending = [("", typer.main.get_command(cli.application()))]
    while pending:
        name, found = pending.pop()
        inner = getattr(found, "commands", {})
        pending += [(f"{name} {key}".strip(), value) for key, value in inner.items()]
        if not inner:
            yield (
                name,
                {option for one in found.params for option in (*one.opts, *one.secondary_opts)},
            )


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


def test_every_example_is_run() -> None:
    shown = {
        named(page): {block.kind for block in blocks(page)} & {"python", "pycon", "console"}
        for page in PAGES
    }
    names = {name for name, kinds in shown.items() if kinds}
    assert names == RUN_BY.keys() | {named(page) for page in followed()}
    for name, test in RUN_BY.items():
        assert f'"{name}"' in (ROOT / "tests" / test).read_text("utf-8"), test
        assert "console" not in shown[name], f"{name}: its test runs no commands: call them `sh`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_file_of_the_project_is_shown_as_it_is(page: Path) -> None:
    for block in blocks(page):
        file = ROOT / block.title
        if block.title and file.is_file():
            assert block.text == file.read_text("utf-8"), f"{page.name}, line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_called_so_and_are_known(page: Path) -> None:
    """What others there are has a reason not to be checked; `tests/pages.py` says which."""
    for block in blocks(page):
        known = r"(?:\S*/)?(?:experience-buffer|make|pip|docker|python3?|curl)(?: |$)"
        if block.kind in ("", "text"):
            assert not re.search(f"^(?:\\$ )?{known}", block.text, re.MULTILINE), (
                f"{page.name}, line {block.line}: call it `sh`, or `console` if it is to be run"
            )
        for line in block.text.replace("\\\n", "").splitlines() if block.kind == "sh" else ():
            is_ours = re.match(r"(?:\S*/)?experience-buffer |make ", line)
            is_left = any(re.match(rf"(?:\S*/)?{re.escape(each)} ", line) for each in NOT_RUN)
            assert is_ours or is_left or not line.split("#")[0].strip(), (
                f"{page.name}, line {block.line}: {line}: run it (`console`), or say why not"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_configuration_loads(page: Path, tmp_path: Path) -> None:
    configurations = [block.text for block in blocks(page) if block.kind == "toml"]
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
    code = "".join(block.text for block in blocks(page))
    shown += re.findall(r"(?<![\w.-])(?:[.\w]*/)*experience-buffer ([a-z]+\b(?!:).*)", code)
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
    return [_parameters(each) for each in found if callable(each)]


def _parameters(function: Callable[..., object]) -> set[str]:
    """Those of a function, and the fields of the `Where` that it takes."""
    named = inspect.signature(function).parameters
    takes_more = any("Unpack[Where]" in str(each.annotation) for each in named.values())
    return set(named) | (Where.__annotations__.keys() if takes_more else set())


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
