"""Changes of what is durable, by themselves: over a store of which the test ends each commit."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from experience_buffer_server.buffer.state.change import RETRY_SECONDS, Changes
from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.store.interface import (
    Store,
    StoreFailedError,
    StoreFullError,
    WriteBatch,
)

FULL = StoreFullError("the disk is full")


class Batch(list[str]):
    """What would be written."""


class HeldStore:
    """Ends no commit by itself."""

    def __init__(self) -> None:
        self.commits: list[tuple[list[str], asyncio.Future[None]]] = []
        """What was submitted and hasn't ended, in order."""
        self.rides = 0

    def batch(self) -> Batch:
        return Batch()

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        if "too long" in batch:
            raise ValueError("a key is too long")
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.commits.append((list(batch), committed))
        return committed

    def ride(self, batch: Batch) -> asyncio.Future[None]:
        self.rides += 1
        return self.commit(batch)

    async def end(self, error: BaseException | None = None) -> list[str]:
        """The oldest commit ends; what was in it."""
        written, committed = self.commits.pop(0)
        if isinstance(error, asyncio.CancelledError):
            committed.cancel()
        elif error is not None:
            committed.set_exception(error)
        else:
            committed.set_result(None)
        await asyncio.sleep(0)
        return written


class Place:
    """Changes, their store, and what was heard of them."""

    def __init__(self) -> None:
        self.store = HeldStore()
        self.tasks = Tasks()
        self.changes = Changes(cast(Store, self.store), self.tasks)
        self.heard: list[str] = []

    def batch(self, *written: str) -> WriteBatch:
        return cast(WriteBatch, Batch(written))

    def begin(self, name: str, **options: Any) -> asyncio.Future[str]:
        """Submit a change that notes how it ends."""
        return self.changes.submit(
            self.batch(name), lambda: self.hear(f"{name} stored"), self.undo(name), **options
        )

    def hear(self, text: str) -> str:
        self.heard.append(text)
        return text

    def undo(self, name: str) -> Callable[[BaseException], object]:
        return lambda error: self.hear(f"{name} failed: {type(error).__name__}")

    def put(self, batch: WriteBatch, items: list[str]) -> Callable[[], object]:
        """Rows as they are now."""
        cast(Batch, batch).extend(items)
        return lambda: self.hear(f"{','.join(items)} on disk")


@pytest.fixture
async def place() -> Place:
    return Place()


# --- one change


async def test_who_waits_gets_what_follows_from_the_commit(place: Place) -> None:
    told = place.begin("a")
    await asyncio.sleep(0)
    assert not place.heard
    assert not told.done()
    await place.store.end()
    assert place.heard == ["a stored"]
    assert await told == "a stored"


async def test_what_fails_is_undone_before_anybody_hears_of_it(place: Place) -> None:
    told = place.begin("a")
    told.add_done_callback(lambda _: place.heard.append("told"))
    await place.store.end(FULL)
    with pytest.raises(StoreFullError) as caught:
        await told
    assert caught.value is FULL
    await asyncio.sleep(0)
    assert place.heard == ["a failed: StoreFullError", "told"]
    assert place.changes.num_failed == 1


async def test_changes_end_in_order_of_submission_whatever_becomes_of_them(place: Place) -> None:
    changes = [place.begin(name) for name in "abcd"]
    assert [written for written, _ in place.store.commits] == [["a"], ["b"], ["c"], ["d"]]
    for error in (None, FULL, asyncio.CancelledError(), None):
        await place.store.end(error)
    assert place.heard == [
        "a stored",
        "b failed: StoreFullError",
        "c failed: CancelledError",
        "d stored",
    ]
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert [str(result) for result in results] == ["a stored", str(FULL), "", "d stored"]
    assert isinstance(results[2], asyncio.CancelledError)


@pytest.mark.parametrize("error", [None, FULL])
async def test_a_change_goes_on_when_nobody_waits_any_more(
    place: Place, error: BaseException | None
) -> None:
    async def call() -> None:
        await place.begin("a")

    waiting = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    waiting.cancel()
    draining = asyncio.ensure_future(place.tasks.drain())
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not draining.done()
    await place.store.end(error)
    assert len(place.heard) == 1
    await draining


async def test_several_may_wait_for_one(place: Place) -> None:
    told = place.begin("a")
    first, second = (asyncio.ensure_future(asyncio.shield(told)) for _ in "ab")
    await asyncio.sleep(0)
    first.cancel()
    await place.store.end()
    assert await second == "a stored"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_what_a_callback_raises_is_told_and_touches_nobody_else(place: Place) -> None:
    def refuse(error: BaseException) -> None:
        raise KeyError("told instead") from error

    def trip() -> None:
        raise KeyError("on the way")

    failing = place.changes.submit(place.batch("a"), None, refuse)
    stored = place.changes.submit(place.batch("b"), trip, refuse)
    other = place.begin("c")
    await place.store.end(FULL)
    await place.store.end()
    await place.store.end()
    with pytest.raises(KeyError, match="told instead") as caught:
        await failing
    assert caught.value.__cause__ is FULL
    with pytest.raises(KeyError, match="on the way"):
        await stored
    assert await other == "c stored"


async def test_what_the_store_refuses_to_take_is_undone_like_all_else(place: Place) -> None:
    told = place.changes.submit(place.batch("too long"), None, place.undo("a"))
    assert not place.heard
    with pytest.raises(ValueError, match="too long"):
        await told
    assert place.heard == ["a failed: ValueError"]


async def test_a_small_change_may_ride(place: Place) -> None:
    told = place.begin("a", rides=True)
    assert place.store.rides == 1
    await place.store.end()
    assert await told == "a stored"


async def test_a_failure_that_nobody_waits_for_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    place.changes.spawn(place.batch("a"), None, place.undo("a"))
    place.changes.spawn(place.batch("b"))
    await place.store.end(FULL)
    await place.store.end(asyncio.CancelledError())
    assert [record.getMessage() for record in caplog.records] == [
        "work in the background failed: the disk is full"
    ]
    assert place.heard == ["a failed: StoreFullError"]


async def test_a_failed_change_leaves_no_circle_behind(place: Place) -> None:
    class Told(KeyError):
        """Can be referred to weakly."""

    def refuse(error: BaseException) -> None:
        raise Told("other") from None

    gc.disable()
    try:
        told = place.changes.submit(place.batch("a"), None, refuse)
        await place.store.end(FULL)
        error = told.exception()
        assert isinstance(error, Told)
        known = weakref.ref(error)
        del told, error
        assert known() is None
    finally:
        gc.enable()


# --- what is owed


async def test_rows_are_owed_once_and_stored_together_as_they_are_by_then(place: Place) -> None:
    rows: dict[str, str] = {"x": "x1", "y": "y1"}

    def put(batch: WriteBatch, items: list[str]) -> None:
        cast(Batch, batch).extend(rows[item] for item in items)

    place.changes.owe(put, ["x", "y"])
    place.changes.owe(put, ["x"])
    place.changes.owe(place.put, ["z"])
    assert place.changes.num_owed == 3
    rows["x"] = "x2"
    assert not place.store.commits
    place.changes.tick(100.0)
    assert await place.store.end() == ["x2", "y1", "z"]
    assert place.heard == ["z on disk"]
    assert not place.store.commits
    assert not place.changes.num_owed
    place.changes.tick(200.0)
    assert not place.store.commits


async def test_what_finds_no_room_again_stays_owed_and_waits(place: Place) -> None:
    place.changes.owe(place.put, ["x"])
    assert not place.changes.describe(), "it hasn't been tried yet"
    place.changes.tick(100.0)
    await place.store.end(FULL)
    assert place.changes.num_owed == 1
    assert place.changes.describe() == "1 changes wait to be stored: the disk is full"
    place.changes.owe(place.put, ["y"])
    place.changes.tick(100.0 + 0.9 * RETRY_SECONDS)
    assert not place.store.commits
    place.changes.tick(100.0 + RETRY_SECONDS)
    assert sorted(await place.store.end()) == ["x", "y"]
    assert not place.changes.describe()
    assert place.changes.num_retries == 2


async def test_rows_that_are_stored_again_at_once_are_owed_if_that_fails(place: Place) -> None:
    place.changes.store_again(place.put, ["x", "x"])
    assert not place.changes.num_owed
    assert await place.store.end(FULL) == ["x"]
    place.changes.tick(100.0)
    assert await place.store.end() == ["x"]
    assert place.heard == ["x on disk"]
    place.changes.close()
    place.changes.store_again(place.put, ["x"])
    assert not place.store.commits


async def test_what_is_tried_again_by_itself_may_be_owed_again(place: Place) -> None:
    tried: list[Sequence[int]] = []

    def again(items: list[int]) -> None:
        tried.append(items)
        place.changes.owe_again(again, items[1:])

    place.changes.owe_again(again, [3, 1, 3, 2])
    for now in (100.0, 102.0, 104.0, 106.0):
        place.changes.tick(now)
    assert tried == [[3, 1, 2], [1, 2], [2]]
    assert not place.store.commits


async def test_rows_are_owed_by_the_methods_of_one_object_once(place: Place) -> None:
    """A bound method is another object each time it is looked up."""
    place.changes.owe(place.put, ["x"])
    place.changes.owe(place.put, ["x"])
    assert place.changes.num_owed == 1


async def test_a_deleted_buffer_owes_nothing_but_ends_what_is_under_way(place: Place) -> None:
    told = place.changes.submit(
        place.batch("a"), None, lambda error: place.changes.owe(place.put, ["x"])
    )
    place.changes.owe(place.put, ["y"])
    place.changes.close()
    place.changes.tick(100.0)
    await place.store.end(FULL)
    with pytest.raises(StoreFullError):
        await told
    place.changes.tick(200.0)
    assert not place.store.commits
    assert not place.changes.num_owed


async def test_nothing_is_tried_again_once_the_store_has_failed(place: Place) -> None:
    told = place.begin("a")
    place.changes.owe(place.put, ["x"])
    await place.store.end(StoreFailedError("its process is gone"))
    with pytest.raises(StoreFailedError):
        await told
    assert place.heard == ["a failed: StoreFailedError"]
    place.changes.owe(place.put, ["y"])
    place.changes.tick(100.0)
    assert not place.store.commits
