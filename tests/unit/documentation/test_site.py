"""The documentation as a site: it builds, nothing in it is missing, and no page asks another host."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.documentation import site

ROOT = Path(__file__).parents[3]
Build = Callable[..., "subprocess.CompletedProcess[str]"]


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(built: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.stem for path in built.rglob("*.html")}
    home = (built / "index.html").read_text("utf-8")
    assert "durable experience buffer" in home


def test_no_page_asks_another_host_for_anything(built: Path) -> None:
    asked = (
        r"""(?:src|srcset)=["']?(?:https?:)?//[^"'\s>]+|<link[^>]+href=["']?(?:https?:)?//[^>]+"""
    )
    for page in built.rglob("*.html"):
        assert re.findall(asked, page.read_text("utf-8")) == [], page.name
    for style in built.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//", style.read_text("utf-8")) == [], style.name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](other.md#nowhere)", "#nowhere"),
        ("[a](../server/nowhere.py)", "nowhere.py"),
    ],
)
def test_a_link_that_leads_nowhere_fails(
    build: Build, tmp_path: Path, text: str, complaint: str
) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "first.md").write_text(f"# First\n\n{text}\n", "utf-8")
    (pages / "other.md").write_text("# Other\n", "utf-8")
    config = tmp_path / "mkdocs.yml"
    hook = "import posixpath\nfrom scripts.documentation.site import on_page_markdown\n"
    (tmp_path / "hook.py").write_text(hook, "utf-8")
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {pages}\nhooks: [{tmp_path / 'hook.py'}]\n"
        "plugins: []\nextra_css: []\nnav: [first.md, other.md]\n",
        "utf-8",
    )
    done = build(tmp_path / "site", "--config-file", config)
    assert done.returncode != 0
    assert complaint in done.stderr


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("[a](delivery.md#streams)", "client.md", "[a](delivery.md#streams)"),
        ("[a](#here)", "client.md", "[a](#here)"),
        ("[a](https://x.example/y.md)", "client.md", "[a](https://x.example/y.md)"),
        ("[a](docs/client.md)", "index.md", "[a](client.md)"),
        ("[a](../README.md)", "client.md", "[a](index.md)"),
        ("[a](../SECURITY.md)", "docker/README.md", "[a](../SECURITY.md)"),
        ("[a](../docker/alerts.yml)", "operations.md", "[a](source/docker/alerts.yml.md)"),
        ("[a](../examples/demo)", "delivery.md", "[a](source/examples/demo/index.md)"),
        ("[docs/client.md](docs/client.md)", "index.md", "[The client](client.md)"),
        ("```\n[a](docs/client.md)\n```", "index.md", "```\n[a](docs/client.md)\n```"),
    ],
)
def test_links_of_the_project_lead_to_pages_of_the_site(
    link: str, page: str, expected: str
) -> None:
    assert site.relink(link, page) == expected


def test_a_linked_folder_is_shown_with_all_that_is_in_it() -> None:
    assert site.linked_sources({"index.md": "[a](docker) [b](docs/client.md) [c](nowhere)"}) == [
        "docker"
    ]
    pages = dict(site.source_pages("docker"))
    assert "[`alerts.yml`](alerts.yml.md)" in pages["source/docker/index.md"]
    assert "```yaml\n" in pages["source/docker/alerts.yml.md"]
