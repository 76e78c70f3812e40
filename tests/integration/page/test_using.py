"""How people use the page: by keys, by links, through a long response; and what a hostile rollout can't do."""

from __future__ import annotations

from typing import Final

from selenium.webdriver.common.keys import Keys

from experience_buffer import EID
from tests.integration.page.browser import NARROW, Browser
from tests.integration.page.world import AGENTS, HOSTILE, LONG, LONG_UID, MATH, NASTY, STUCK
from tests.integration.server import eventually

_GROUPS: Final = f"#/b/{MATH}/groups"
_MEMBER: Final = f"#/b/{MATH}/experience/0/20/0/0/x"


def focused(browser: Browser) -> str:
    return str(browser.value("document.activeElement.textContent"))


def test_one_goes_from_the_overview_to_a_token_by_keys_alone(browser: Browser) -> None:
    browser.look(_GROUPS)
    browser.press("j")
    assert focused(browser) == STUCK
    browser.press("j", "k")
    assert focused(browser) == STUCK
    browser.press(Keys.ENTER)
    browser.settled(f"#/b/{MATH}/group/{STUCK}")
    browser.press("j", "j", Keys.ENTER)
    browser.settled(f"#/b/{MATH}/experience/{STUCK}/1/0/x")
    browser.press("[")
    browser.settled(f"#/b/{MATH}/experience/{STUCK}/0/0/x")
    browser.press("]")
    browser.settled(f"#/b/{MATH}/experience/{STUCK}/1/0/x")
    browser.press("t")
    browser.waited("location.hash.endsWith('colour=logprob')")
    browser.run("document.querySelector('.tokens').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "position 1" in browser.text(".looking")
    browser.press("g")
    browser.settled("#/")


def test_what_has_the_focus_is_seen(browser: Browser) -> None:
    browser.look(_GROUPS)
    browser.press("j")
    script = "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]"
    assert browser.run(script) == ["solid", "2px"]


def test_back_leads_to_where_one_was(browser: Browser) -> None:
    browser.look(_GROUPS)
    browser.run("scrollTo(0, 40)")
    browser.click(f"a[href='#/b/{MATH}/group/0/20']")
    browser.settled(f"#/b/{MATH}/group/0/20")
    assert browser.value("scrollY") == 0
    browser.go_back()
    browser.settled(_GROUPS)
    browser.waited("scrollY === 40")


def test_the_list_of_keys_stays_while_the_page_is_live(browser: Browser) -> None:
    browser.look(_GROUPS)
    browser.waited("document.querySelector('.live.on') !== null")
    browser.press("?")
    assert "previous and next member" in browser.text("#keys")
    browser.shot("keys")
    browser.run("window.dispatchEvent(new HashChangeEvent('hashchange'))")
    assert browser.value("document.getElementById('keys').open")
    browser.press(Keys.ESCAPE)
    assert not browser.value("document.getElementById('keys').open")


def test_search_is_everywhere_and_its_address_can_be_sent(browser: Browser) -> None:
    browser.look(_MEMBER)
    browser.press("/", "reward < 0.5 version = 12", Keys.ENTER)
    browser.waited("location.hash.startsWith('#/b/math/search?q=')")
    browser.settled(browser.place)
    rewards = (
        "[...document.querySelectorAll('td[data-name=Reward]')].map((cell) => cell.textContent)"
    )
    assert set(browser.waited(rewards)) == {"0.00"}
    address = browser.place
    browser.look(address)
    assert set(browser.waited(rewards)) == {"0.00"}


def test_what_cannot_be_understood_is_said(browser: Browser) -> None:
    browser.look(f"#/b/{MATH}/search?q=rewards+%3C+0+colour+%3D+red")
    assert "rewards <: only = is known for it; colour isn't known" in browser.text()


def test_tables_are_sorted_by_a_click_and_filtered_by_state(browser: Browser) -> None:
    browser.look(_GROUPS)
    browser.run(
        "[...document.querySelectorAll('th button')].find((b) => b.textContent === 'Mean reward').click()"
    )
    browser.waited("location.hash.includes('sort=Mean')")
    script = "[...document.querySelectorAll('td[data-name=\"Mean reward\"]')].map((cell) => Number(cell.textContent))"
    values = browser.value(script)
    assert len(set(values)) > 1
    assert values == sorted(values)
    browser.run(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Open').click()"
    )
    browser.waited("document.querySelectorAll('tbody tr').length === 2")
    assert "state=open" in browser.place


def test_the_computation_is_told_with_its_numbers(browser: Browser) -> None:
    browser.look(f"#/b/{MATH}/group/0/20")
    assert (
        "grpo: (1.00 \N{MINUS SIGN} mean 0.50) / (std 0.58 + 1e\N{MINUS SIGN}6) = 0.87 for run "
        in browser.text(".sum")
    )
    assert "4 votes, 0 masked" in browser.text(".sum")


def test_a_long_response_is_drawn_where_it_is_looked_at(browser: Browser) -> None:
    browser.look(f"#/b/{AGENTS}/experience/{LONG_UID}")
    assert f"{LONG:,} response tokens" in browser.text()
    drawn = "document.querySelectorAll('.token').length"
    assert 0 < browser.value(drawn) < 8000
    browser.run("const t = document.querySelector('.tokens'); t.scrollTop = t.scrollHeight * 0.5")
    browser.waited("Number(document.querySelector('.tokens [data-t]')?.dataset.t) > 10000")
    assert browser.value(drawn) < 8000
    browser.run("document.querySelector('.tokens').focus()")
    browser.press(Keys.END)
    browser.waited(
        f"document.querySelector('.looking').textContent.includes('position {LONG - 1:,}')"
    )
    browser.waited(f"document.querySelector('[data-t=\"{LONG - 1}\"]') !== null")
    assert browser.complaints() == []


def test_an_address_leads_to_a_token(browser: Browser) -> None:
    browser.look(f"#/b/{AGENTS}/experience/{LONG_UID}?at=60000")
    script = """
    const token = document.querySelector('[data-t="60000"]')?.getBoundingClientRect();
    const box = document.querySelector(".tokens").getBoundingClientRect();
    return !!token && token.top >= box.top && token.bottom <= box.bottom;
    """
    browser.waited(f"(() => {{ {script} }})()")
    browser.shot("long")


def test_masked_tokens_are_grey_and_struck(browser: Browser) -> None:
    browser.look(f"#/b/{AGENTS}/experience/agents/1/1/0/x?colour=mask")
    texts = "[...document.querySelectorAll('.token.masked')].map((token) => token.textContent)"
    assert "".join(browser.value(texts)) == "⏎\n169⏎\n"
    style = "getComputedStyle(document.querySelector('.token.masked')).textDecorationLine"
    assert browser.value(style) == "line-through"


def test_an_image_in_a_message_is_drawn(browser: Browser) -> None:
    browser.look(f"#/b/{AGENTS}/experience/agents/1/1/0/x")
    browser.waited("document.querySelector('.turn img')?.naturalWidth === 40")
    assert browser.complaints() == []


def test_live_numbers_change_and_nothing_else_moves(browser: Browser) -> None:
    browser.look(f"#/b/{MATH}/consumers")
    browser.run("window.kept = document.querySelector('tbody td')")
    browser.waited("document.querySelector('.live.on') !== null")
    assert browser.run("const now = document.querySelector('tbody td'); return now === window.kept")


def test_what_a_hostile_rollout_has_written_is_text(browser: Browser) -> None:
    eid = EID(NASTY[:60], f"../{NASTY[:30]}#?&%2F", 0, 0, "'\"><b>")
    where = "encodeURIComponent(arguments[0]).replaceAll('%2F', '/')"
    uid, group = (browser.run(f"return {where}", text) for text in (eid.uid, eid.tid))
    views = (
        "",
        "/groups",
        "/search",
        "/leases",
        "/departures",
        f"/group/{group}",
        f"/experience/{uid}",
    )
    for width in (NARROW, 1400):
        for view in views:
            browser.look(f"#/b/{HOSTILE}{view}", width=width)
            assert browser.value("typeof window.hacked") == "undefined", view
            assert browser.value("({}).polluted === undefined && ({}).hacked === undefined")
            assert (
                browser.value(
                    "document.querySelectorAll('main script, main iframe, main b > img').length"
                )
                == 0
            )
            assert browser.value("document.documentElement.scrollWidth") <= width, view
            assert not any(
                mark in browser.text("body") for mark in ("\u202e", "\x1b", "\x00", "\u2028")
            )
    browser.waited("document.querySelector('.looking') !== null")
    assert "<script>window.hacked = 1</script>" in browser.text()
    assert "⟨U+202E⟩" in browser.text()
    assert "Image elsewhere, not loaded: javascript:window.hacked=1" in browser.text()
    browser.shot("hostile")
    assert browser.complaints() == []
    assert browser.strangers() == []


def test_a_theme_that_is_chosen_stays(browser: Browser) -> None:
    browser.look(_GROUPS, theme="light")
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    choose = "const s = document.getElementById('theme'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    browser.run(choose, "dark")
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    browser.open(_GROUPS)
    assert browser.value("getComputedStyle(document.body).backgroundColor") == dark
    browser.run(choose, "")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == light


def test_a_tab_that_nobody_sees_asks_for_nothing(browser: Browser) -> None:
    browser.open(_GROUPS)
    browser.waited("document.querySelector('.live.on') !== null")
    seen = "Object.defineProperty(document, 'hidden', { value: arguments[0], configurable: true });"
    seen += "document.dispatchEvent(new Event('visibilitychange'))"
    browser.run(seen, True)
    eventually(browser.has_hung_up, "the events to end")
    # Whatever else it had asked for by then isn't asked for again.
    browser.asked()
    browser.run("window.dispatchEvent(new Event('theme'))")
    assert browser.asked() == []
    browser.run(seen, False)
    eventually(lambda: any(url.endswith("/events") for url in browser.asked()), "new events")


def test_it_can_be_heard(browser: Browser) -> None:
    told = """
    const named = (each) => each.getAttribute("aria-label") || each.textContent.trim() || each.title;
    return [...document.querySelectorAll("svg, canvas, button, a, table, [role=img]")].filter((each) => each.checkVisibility() && !named(each)).map((each) => each.outerHTML.slice(0, 120));
    """
    for view in (
        "#/",
        f"#/b/{MATH}",
        _GROUPS,
        f"#/b/{MATH}/group/0/20",
        _MEMBER,
        f"#/b/{MATH}/steps",
    ):
        browser.look(view)
        assert browser.run(told) == [], view
        assert browser.value("document.querySelectorAll('h1').length") == 1, view
        unnamed = "[...document.querySelectorAll('main input, main select')].filter((each) => !each.labels.length).length"
        assert browser.value(unnamed) == 0, view
