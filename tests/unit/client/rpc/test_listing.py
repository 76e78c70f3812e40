"""What `list` returns, as a notebook shows it."""

from __future__ import annotations

from typing import Any

from experience_buffer import AsyncClient, Client
from tests.unit.client.rpc.pushed import FAST, experience


def test_a_notebook_shows_the_page_that_comes_next(script: Any, server: Any) -> None:
    with Client(server[1], options=FAST) as client:
        client.push([experience(run) for run in range(5)])
        found = client.list(page_size=3)
        text = found._repr_html_()
        assert text.count("<tr>") == 4  # The header, too.
        assert repr(found) == f"<Pages of 'default' at {server[1]}: 3 fetched, more to fetch>"
        # Shown, not consumed.
        assert len(list(found)) == 5
        assert "nothing" in found._repr_html_()
        assert len([r for r in script.requests if hasattr(r, "page_token")]) == 2


async def test_that_of_the_async_client_shows_what_was_fetched(script: Any, server: Any) -> None:
    async with AsyncClient(server[1], options=FAST) as client:
        await client.push([experience(run) for run in range(5)])
        found = client.list(page_size=3)
        assert "nothing" in found._repr_html_()
        assert (await anext(found)).uid == experience(0).eid.uid
        assert found._repr_html_().count("<tr>") == 3


def test_a_notebook_says_why_there_is_nothing_to_show() -> None:
    with Client("127.0.0.1:1", timeout=0.05) as client:
        text = client.list()._repr_html_()
    assert "list to 127.0.0.1:1 failed" in text
    assert "<table>" not in text
