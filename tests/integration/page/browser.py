"""A real Chromium that looks at the page, and tells what it asked for and what it complained of."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains

from tests.integration.server import eventually

SHOTS: Final = Path(__file__).parents[3] / "test-output" / "page"
"""Where screenshots are kept: to be looked at, not compared."""
WIDE, NARROW = 1400, 390
_HEIGHT = 900
_TALLEST = 2400
_SETTLED = (
    "const main = document.querySelector('main');"
    "return main?.dataset.place === arguments[0] && main.ariaBusy === 'false' && !main.querySelector('.wanting')"
)
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--force-device-scale-factor=1"),
    *("--hide-scrollbars", "--force-prefers-reduced-motion", "--lang=en-US"),
)


class Browser:
    """One window of it. Belongs to one test at a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver
        self.base = ""
        """The address of the page, with its last slash."""
        self.width = WIDE

    def open(self, hash_: str) -> None:
        """Open a view in a tab that has shown nothing before."""
        self._driver.get("about:blank")
        self._driver.get(self.base + hash_)
        self.settled(hash_)

    def look(self, hash_: str, *, width: int = WIDE, theme: str = "light") -> None:
        """Go to a view, as wide and in the theme that is asked for, as somebody who follows a link."""
        self.size(width)
        medium = [{"name": "prefers-color-scheme", "value": theme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": medium})
        if str(self._driver.current_url).startswith(self.base):
            self.run("location.hash = arguments[0]", hash_)
            self.settled(hash_)
        else:
            self.open(hash_)

    def settled(self, hash_: str) -> None:
        """Wait until a view shows what it has."""
        eventually(lambda: self.run(_SETTLED, hash_), f"{hash_} to be drawn", seconds=15)

    def size(self, width: int, height: int = _HEIGHT) -> None:
        """Change the window's size; a narrow one is a telephone."""
        self.width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self._driver.execute_script(script, *arguments)

    def value(self, expression: str) -> Any:
        """The value of an expression."""
        return self.run(f"return {expression}")

    def waited(self, expression: str, *, seconds: float = 15) -> Any:
        """The value of an expression, once it is true."""
        return eventually(lambda: self.value(expression), expression, seconds=seconds)

    def text(self, selector: str = "main") -> str:
        """What people read of an element."""
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        ActionChains(self._driver).send_keys(*keys).perform()

    def click(self, selector: str) -> None:
        """Click on an element as a pointer would."""
        self._driver.find_element("css selector", selector).click()

    def go_back(self) -> None:
        """Press the browser's button."""
        self._driver.back()

    @property
    def title(self) -> str:
        """The title of the tab."""
        return str(self._driver.title)

    @property
    def place(self) -> str:
        """What the address has behind its "#", with it."""
        return str(self.value("location.hash"))

    def shot(self, name: str) -> Path:
        """Keep a picture of the whole view."""
        tall = int(self.value("document.documentElement.scrollHeight"))
        self.size(self.width, min(max(tall, _HEIGHT), _TALLEST))
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        assert self._driver.save_screenshot(str(path))
        self.size(self.width)
        return path

    def complaints(self) -> list[str]:
        """What it has logged since it was asked last: errors, and what the content policy stopped."""
        entries = self._driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [
            f"{each['level']}: {each['message']}" for each in entries if each["level"] != "INFO"
        ]

    def asked(self) -> list[str]:
        """Addresses that it has asked anybody for since this was called last."""
        return [str(each["request"]["url"]) for each in self._network("requestWillBeSent")]

    def has_hung_up(self) -> bool:
        """Whether it has given up an answer that it was reading, since this or `asked` was called last."""
        return any(each.get("canceled") for each in self._network("loadingFailed"))

    def _network(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for entry in self._driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == f"Network.{kind}":
                found.append(message["params"])
        return found

    def strangers(self) -> list[str]:
        """Those of them that aren't of the page's server, nor made in the page itself."""
        own = urlsplit(self.base).netloc
        local = re.compile(r"(blob|data|about|chrome-untrusted|chrome):")
        return [url for url in self.asked() if urlsplit(url).netloc != own and not local.match(url)]


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser, ended afterwards; the test is skipped where there is none, but fails under CI."""
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium", "chromium-browser", "google-chrome")
    for option in (*_OPTIONS, f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver is named: selenium would look for one on the net.
    driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def _program(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    message = (
        f"{names[0]} isn't installed; install the Debian packages chromium and chromium-driver"
    )
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
