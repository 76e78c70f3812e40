"""What docs/client.md shows happens, on a real server; its table has every error."""

from __future__ import annotations

import builtins
import re

from experience_buffer import errors
from tests.integration.pages import DOCS, run_examples
from tests.integration.server import MakeServer

_PAGE = DOCS / "client.md"


def test_the_examples_do_what_the_page_says(make_server: MakeServer) -> None:
    assert run_examples(_PAGE, make_server().address) > 25


def test_every_error_is_explained_and_is_what_the_table_says() -> None:
    rows = re.findall(r"^\| (`\w+Error`.*?) \| `(\w+)` \|", _PAGE.read_text("utf-8"), re.MULTILINE)
    listed = {name: base for names, base in rows for name in re.findall(r"`(\w+)`", names)}
    assert {*listed, "ExperienceBufferError"} == set(errors.__all__)
    for name, base in listed.items():
        assert issubclass(getattr(errors, name), getattr(builtins, base)), name
