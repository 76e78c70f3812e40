"""What mkdocs calls while it builds the site: pages that aren't in docs/, links, and the reference.

On a code host the pages link one another, and the project's files, by relative paths. Here README.md
becomes the site's home, other pages of the project keep their names, and a linked file or folder
becomes a page that shows it. What no page can lead to is left for mkdocs to find, which is strict.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PROJECT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "docker/README.md": "docker/README.md",
}
"""Pages outside of docs/: where they are in the project, and in the site."""
SOURCES = "source"
"""The site's folder of pages that show files of the project."""
_LINK = re.compile(r"(\[[^\[\]]*\])\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".proto": "protobuf",
    ".json": "json",
    ".yml": "yaml",
    ".yaml": "yaml",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that aren't in docs/."""
    from mkdocs.structure.files import File

    from scripts.documentation import reference

    pages = {name: (ROOT / path).read_text("utf-8") for path, name in PROJECT_PAGES.items()}
    pages |= {name: made() for name, made in reference.PAGES.items()}
    texts = dict(pages)
    texts |= {file.src_uri: file.content_string for file in files.documentation_pages()}
    for path in linked_sources(texts):
        pages.update(source_pages(path))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site, and sessions of Python look like such."""
    if page.parent is None:
        # One of its own: a list of pages would have one entry.
        page.meta["hide"] = ["navigation"]
    markdown = markdown.replace("```python\n>>> ", "```pycon\n>>> ")
    return relink(markdown, page.file.src_uri)


def relink(markdown: str, site_name: str) -> str:
    """A page's text with its links to files of the project as links to pages of the site."""

    def changed(match: re.Match[str]) -> str:
        text, target = match.groups()
        name = PurePosixPath(target.partition("#")[0]).name
        if name.endswith(".md") and PurePosixPath(text[1:-1]).name == name:
            text = f"[{_title(_in_project(target, site_name)) or name}]"
        return f"{text}({_in_site(target, site_name)})"

    return "".join(
        text if is_code else _LINK.sub(changed, text) for is_code, text in _parts(markdown)
    )


def linked_sources(texts: dict[str, str]) -> list[str]:
    """Files and folders that pages link and that are no pages themselves."""
    found: set[str] = set()
    for name, text in texts.items():
        for is_code, part in _parts(text):
            for _, target in () if is_code else _LINK.findall(part):
                path = _in_project(target, name)
                if path is not None and _page_of(path) is None and (ROOT / path).exists():
                    found.add(path)
    return sorted(found)


def source_pages(path: str) -> Iterator[tuple[str, str]]:
    """Pages that show a file, or a folder with all that is in it."""
    place = ROOT / path
    unsearched = "---\nsearch: { exclude: true }\nhide: [navigation]\n---\n"
    if place.is_dir():
        inside = sorted(each for each in place.iterdir() if not each.name.startswith(("_", ".")))
        names = [f"- [`{each.name}`]({_file_name(each)})\n" for each in inside]
        yield f"{SOURCES}/{path}/index.md", f"{unsearched}# `{path}/`\n\n{''.join(names)}"
        for each in inside:
            yield from source_pages(f"{path}/{each.name}")
        return
    language = _LANGUAGES.get(place.suffix, "text")
    text = place.read_text("utf-8")
    # More backquotes than the file has in a row.
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    yield (
        f"{SOURCES}/{path}.md",
        f"{unsearched}# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n",
    )


def _title(path: str | None) -> str | None:
    """The first heading of a page of the project, in place of the name of its file."""
    if path is None or not (ROOT / path).is_file():
        return None
    found = re.search(r"^# (.+)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
    return found[1] if found else None


def _file_name(place: Path) -> str:
    return f"{place.name}/index.md" if place.is_dir() else f"{place.name}.md"


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """A page's text in pieces, each with whether it is code."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield False, markdown[end : fence.start()]
        yield True, fence[0]
        end = fence.end()
    yield False, markdown[end:]


def _in_site(target: str, site_name: str) -> str:
    """A link's target, as the site's page needs it."""
    path = _in_project(target, site_name)
    if path is None:
        return target
    place = ROOT / path
    name = _page_of(path)
    if name is None and place.exists():
        name = f"{SOURCES}/{path}/index.md" if place.is_dir() else f"{SOURCES}/{path}.md"
    if name is None:
        return target
    anchor = target.partition("#")[2]
    relative = posixpath.relpath(name, posixpath.dirname(site_name) or ".")
    return f"{relative}#{anchor}" if anchor else relative


def _in_project(target: str, site_name: str) -> str | None:
    """The path in the project that a page's link leads to; None: another host, or within the page."""
    path = target.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    if site_name.startswith(f"{SOURCES}/"):
        return None
    places = {name: place for place, name in PROJECT_PAGES.items()}
    folder = PurePosixPath(places.get(site_name, f"docs/{site_name}")).parent
    return posixpath.normpath(str(folder / path))


def _page_of(path: str) -> str | None:
    """The site's page, or picture, of a path in the project."""
    if path in PROJECT_PAGES:
        return PROJECT_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None
