"""The page's files: what is served, under which types, and what a browser needn't fetch again."""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from experience_buffer_server.web import pages
from tests.unit.builders import World
from tests.unit.web.asking import Asking, asking

ROOT = Path(__file__).parents[3]
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "page"
    (folder / "views").mkdir(parents=True)
    (folder / "index.html").write_text("<p>index")
    (folder / "views" / "one.js").write_text("1;")
    (folder / ".secret").write_text("secret")
    (tmp_path / "outside.js").write_text("outside")
    monkeypatch.setattr(pages.Pages.__init__, "__defaults__", (folder,))
    return folder


@pytest.fixture
async def web(world: World, folder: Path) -> AsyncIterator[Asking]:
    async with asking(await world.backend()) as made:
        yield made


async def test_files_have_their_types(web: Asking) -> None:
    script = await web.get("/ui/views/one.js")
    assert script.text == "1;"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    page = await web.get("/ui/", Accept=BROWSER)
    assert (page.status, page.text) == (200, "<p>index")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert (await web.get("/ui/no.js")).status == 404
    assert (await web.get("/ui")).headers["location"] == "/ui/"


async def test_an_address_within_the_page_leads_behind_its_mark(web: Asking) -> None:
    for path, place in {
        "b/math/groups?state=open": "b/math/groups?state=open",
        "b/math/group/0/27": "b/math/group/0/27",
        "b/m%22:%20a/x%23y%3Fz": "b/m%22%3A%20a/x%23y%3Fz",
        "/elsewhere.example/": "/elsewhere.example/",
    }.items():
        answer = await web.get(f"/ui/{path}", Accept=BROWSER)
        assert (answer.status, answer.headers["location"]) == (307, f"/ui/#/{place}")


async def test_a_browser_that_can_gets_it_compressed(web: Asking) -> None:
    plain = await web.get("/ui/views/one.js")
    packed = await web.get("/ui/views/one.js", Accept_Encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["etag"] != plain.headers["etag"]
    assert packed.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize(
    "path", ["/ui/../outside.js", "/ui/%2e%2e/outside.js", "/ui/.secret", "/ui//etc/passwd"]
)
async def test_nothing_else_is_served(web: Asking, path: str) -> None:
    assert (await web.get(path)).status == 404


async def test_what_a_browser_has_isn_t_sent_again(web: Asking, folder: Path) -> None:
    first = await web.get("/ui/views/one.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await web.get("/ui/views/one.js", If_None_Match=f'"x", {first.headers["etag"]}')
    assert (again.status, again.body) == (304, b"")
    (folder / "views" / "one.js").write_text("22;")
    os.utime(folder / "views" / "one.js", (1, 1))
    changed = await web.get("/ui/views/one.js", If_None_Match=first.headers["etag"])
    assert (changed.status, changed.text) == (200, "22;")


async def test_the_landing_page_leads_on(web: Asking) -> None:
    page = await web.get("/", Accept=BROWSER)
    assert 'href="/ui/"' in page.text
    assert "Version" in page.text
    assert (await web.get("/")).data["links"]["/ui/"]


async def test_a_page_that_is_off_isn_t_there(world: World, folder: Path) -> None:
    world.limits = world.limits.model_copy(update={"page": False})
    async with asking(await world.backend()) as web:
        assert (await web.get("/ui/", Accept=BROWSER)).status == 404
        assert "/ui/" not in (await web.get("/")).data["links"]
        assert "/ui/" not in (await web.get("/", Accept=BROWSER)).text


def test_all_of_the_page_comes_with_the_wheel() -> None:
    builder = WheelBuilder(str(ROOT))
    with builder.config.set_build_data({"artifacts": [], "force_include": {}, "build_hooks": ()}):
        packed = {file.distribution_path for file in builder.recurse_included_files()}
    files = [path for path in pages.FOLDER.rglob("*") if path.is_file()]
    assert pages.FOLDER / pages.INDEX in files
    base = pages.FOLDER.parents[1]
    assert {str(path.relative_to(base.parent)) for path in files} <= packed
