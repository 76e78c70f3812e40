"""Every view, light and dark, on a laptop and a telephone: whole, legible, and without a request elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

import pytest

import experience_buffer_server
from tests.integration.page.browser import NARROW, WIDE, Browser
from tests.integration.page.world import AGENTS, EMPTY, MATH, STUCK

_FILES: Final = Path(experience_buffer_server.__file__).parent / "web" / "page"
_MOST_BYTES: Final = 75_000
_CONTRAST: Final = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
_VIEWS: Final = {
    "overview": ("#/", "onsumer trainer of math"),
    "buffer": (f"#/b/{MATH}", "policy version"),
    "groups": (f"#/b/{MATH}/groups", STUCK),
    "group": (f"#/b/{MATH}/group/0/20", "mean 0.50"),
    "stuck": (f"#/b/{MATH}/group/{STUCK}", "It hasn't been pushed"),
    "failed": (f"#/b/{MATH}/group/0/29", "the sandbox timed out"),
    "compared": (f"#/b/{MATH}/group/0/20?compare=0%2C1", "What differs"),
    "experience": (f"#/b/{AGENTS}/experience/agents/1/1/0/x", "I compute it with the tool"),
    "leases": (f"#/b/{MATH}/leases", "1 open lease"),
    "consumers": (f"#/b/{MATH}/consumers", "reference"),
    "steps": (f"#/b/{MATH}/steps", "Without variance"),
    "step": (f"#/b/{MATH}/step/trainer/2", "16"),
    "departures": (f"#/b/{MATH}/departures", "its environment was shut down"),
    "search": (f"#/b/{AGENTS}/search?q=reward+%3C+0", "agents/0/1/0/x"),
    "archived": (f"#/b/{MATH}/experience/0/0/0/0/x", "acknowledged for trainer at step 1"),
    "archive": (f"#/b/{MATH}/search?from=archive", "0/0/0/0/x"),
    "empty": (f"#/b/{EMPTY}", "These three lines"),
}
_LOOKS: Final = [(WIDE, "light"), (WIDE, "dark"), (NARROW, "dark"), (NARROW, "light")]


@pytest.mark.parametrize("view", _VIEWS)
def test_it_is_whole_legible_and_asks_nobody_else(browser: Browser, view: str) -> None:
    hash_, expected = _VIEWS[view]
    for width, theme in _LOOKS:
        browser.look(hash_, width=width, theme=theme)
        browser.waited("document.querySelector('.live.on') !== null")
        assert expected in browser.text(), f"{width} {theme}"
        assert browser.value("document.documentElement.scrollWidth") <= width, theme
        assert browser.run(_CONTRAST, 4.5) == [], f"{width} {theme}"
        browser.shot(f"{view}-{width}-{theme}")
    assert browser.complaints() == []
    assert browser.strangers() == []


def test_it_is_small_and_comes_at_once(browser: Browser) -> None:
    files = {path.relative_to(_FILES).as_posix() for path in _FILES.rglob("*") if path.is_file()}
    sizes = {}
    for name in files:
        request = Request(browser.base + name, headers={"Accept-Encoding": "gzip"})
        with urlopen(request, timeout=20) as answer:
            sizes[name] = len(answer.read())
    assert sum(sizes.values()) < _MOST_BYTES, sizes
    # What the browser knows of from the beginning it needn't find out module by module.
    index = (_FILES / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:href|src)="([\w/.]+\.\w+)"', index)) == files - {"index.html"}


def test_each_view_names_the_tab(browser: Browser) -> None:
    browser.look(f"#/b/{MATH}/group/{STUCK}")
    assert browser.title.startswith(f"{STUCK} · {MATH} · 3 of 4")
    browser.look(f"#/b/{MATH}/steps")
    assert browser.title.startswith(f"Steps · {MATH}")


def test_colours_follow_the_values_and_a_zero_has_none(browser: Browser) -> None:
    browser.look(f"#/b/{MATH}/groups")
    script = """
    const of = (name) => { const i = document.createElement("i"); i.className = `token ${name}`;
      document.querySelector("main").append(i); const c = getComputedStyle(i).backgroundColor; i.remove(); return c; };
    return [of("d0"), of("d5"), of("d-5"), of("d10"), of("d-10")];
    """
    colours = browser.run(script)
    assert len(set(colours)) == 5
