"""The sync client is what the script makes of the async one."""

from __future__ import annotations

import pytest

from scripts import generate_sync

ASYNC = '''\
"""Of the async client."""

from collections.abc import AsyncIterator, Awaitable

from experience_buffer._async.batch import AsyncBatch


class AsyncThing:
    async def __aenter__(self) -> AsyncBatch:
        async with self.lock, self.other() as batch:
            return await anext(aiter([await each for each in batch]))

    async def __anext__(self, wait: Callable[[int], Awaitable[int | None]]) -> AsyncIterator[int]:
        async for each in asyncio_things(wait):
            yield await each
        raise StopAsyncIteration
'''
SYNC = '''\
# Generated from _async/thing.py by scripts/generate_sync.py; edit that file.
"""Of the sync client."""

from collections.abc import Iterator

from experience_buffer._sync.batch import Batch


class Thing:
    def __enter__(self) -> Batch:
        with self.lock, self.other() as batch:
            return next(iter([each for each in batch]))

    def __next__(self, wait: Callable[[int], int | None]) -> Iterator[int]:
        yield from asyncio_things(wait)
        raise StopIteration
'''


def test_words_and_imports_are_those_of_the_sync_client() -> None:
    source = f"{generate_sync.CLIENT}/_async/thing.py"
    text = generate_sync.generated(source, ASYNC, set())
    assert generate_sync.formatted(text, f"{generate_sync.CLIENT}/_sync/thing.py") == SYNC


def test_what_is_committed_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_sync.main(["--check"]) == 0, capsys.readouterr().err


def test_a_change_of_either_side_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(generate_sync.TEXTS, "every verb", "each verb")
    assert generate_sync.main(["--check"]) == 1
    assert "nothing says any more: ['every verb']" in capsys.readouterr().err
    monkeypatch.setitem(generate_sync.TEXTS, "Verbs about whole buffers.", "Verbs.")
    monkeypatch.delitem(generate_sync.TEXTS, "every verb")
    assert generate_sync.main(["--check"]) == 1
    text = capsys.readouterr().err
    assert '-    """Verbs about whole buffers."""\n+    """Verbs."""' in text
    assert text.endswith("out of date; run: make sync\n")
