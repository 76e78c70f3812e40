"""Changes of what is durable: submitted, stored or failed, and what is owed to the disk.

Whoever changes what is durable fills a batch, changes memory along with it, and submits the batch
with what follows from its outcome. Nobody else waits for a commit or undoes one that has failed.
Belongs to one buffer and its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, overload

from experience_buffer_server.runtime.tasks import Tasks
from experience_buffer_server.store.interface import Store, StoreFailedError, WriteBatch

_T = TypeVar("_T")
_Item = TypeVar("_Item", bound=Hashable)
_log = logging.getLogger(__name__)

Put: TypeAlias = Callable[[WriteBatch, list[_Item]], Callable[[], object] | None]
"""Adds what now holds of some items to a batch; returns what follows once that is on disk."""
Again: TypeAlias = Callable[[list[_Item]], object]
"""Tries again what found no room for some items; may owe some of them again."""

RETRY_SECONDS: Final = 1.0
"""Between attempts to store what is owed."""


class Changes:
    """The changes of one buffer, and what it owes to the disk. Not thread-safe.

    ```
    filled ──submit──▶ UNDER WAY ──on disk──▶ STORED: `stored` runs, who waits gets its result
                           │
                           └──no room, or the store has failed──▶ FAILED: `failed` undoes what
                               memory did, who waits gets the error; it may owe some of it to the
                               disk: ──▶ OWED ──tick──▶ UNDER WAY again, as it is by then
    ```

    One of `stored` and `failed` runs, once, in the step of the event loop in which the commit's end is
    heard of: in the order of submission, since that is the order in which a store commits. It runs
    whether anybody still waits or not, and also where the buffer was deleted meanwhile. Where it
    raises, who waits gets that error instead; nobody else is touched by it.

    Rows are owed where memory goes ahead of the disk: they are stored as they are by then, all with
    one commit. What would be done anew, such as a removal, is tried again by whoever owes it. There is
    one queue, keyed by who owes and what: owing something twice is owing it once. Its clock is `tick`.
    """

    def __init__(self, store: Store, tasks: Tasks) -> None:
        """`tasks` are the buffer's: whoever drains them waits for the changes under way, too."""
        self._store = store
        self._tasks = tasks
        self._rows: dict[Put[Any], dict[Hashable, None]] = {}
        self._again: dict[Again[Any], dict[Hashable, None]] = {}
        self._next_retry = 0.0
        self._why = ""
        """Why what is owed could not be stored; empty: it could, or hasn't been tried yet."""
        self._is_over = False
        """The buffer was deleted, or the store can't go on: nothing is owed to it any more."""
        self.num_failed = 0
        """Changes that could not be stored."""
        self.num_retries = 0
        """Rounds in which what was owed was tried again."""

    def batch(self) -> WriteBatch:
        """Start a batch."""
        return self._store.batch()

    @overload
    def submit(
        self,
        batch: WriteBatch,
        stored: Callable[[], _T],
        failed: Callable[[BaseException], object] | None = None,
        *,
        rides: bool = False,
    ) -> asyncio.Future[_T]: ...

    @overload
    def submit(
        self,
        batch: WriteBatch,
        stored: None = None,
        failed: Callable[[BaseException], object] | None = None,
        *,
        rides: bool = False,
    ) -> asyncio.Future[None]: ...

    def submit(
        self,
        batch: WriteBatch,
        stored: Callable[[], Any] | None = None,
        failed: Callable[[BaseException], object] | None = None,
        *,
        rides: bool = False,
    ) -> asyncio.Future[Any]:
        """Submit a batch here and now; whatever is submitted later comes later on the disk.

        Args:
            batch: From `batch`.
            stored: Runs when it is on disk.
            failed: Runs with the error when it could not be stored: the one place where what memory
                did is undone. What it raises is told instead.
            rides: It is small, and may wait a moment for an append to commit with; see `Store.ride`.

        Returns:
            What `stored` has returned, for one call to wait for. That call may be cancelled; of several
            that wait each needs `asyncio.shield`. Where nobody waits, `log` tells of a failure.

        Raises:
            StoreFullError: From the future: no room; nothing of the batch is stored.
            StoreFailedError: From the future: the store can't go on.
        """
        store, loop = self._store, asyncio.get_running_loop()
        told: asyncio.Future[Any] = loop.create_future()
        committed: asyncio.Future[Any]
        try:
            committed = asyncio.ensure_future(store.ride(batch) if rides else store.commit(batch))
        except Exception as error:
            # Memory is ahead of it all the same, and is set right as after any other failure.
            committed = loop.create_future()
            committed.set_exception(error)
        committed.add_done_callback(partial(self._ended, stored, failed, told))
        self._tasks.include(committed)
        return told

    def _ended(
        self,
        stored: Callable[[], _T] | None,
        failed: Callable[[BaseException], object] | None,
        told: asyncio.Future[_T | None],
        committed: asyncio.Future[None],
    ) -> None:
        """A commit has ended: run what follows, and tell who waits."""
        error = asyncio.CancelledError() if committed.cancelled() else committed.exception()
        try:
            if error is None:
                result = None if stored is None else stored()
                if not told.done():
                    told.set_result(result)
            else:
                self._note_failure(error)
                if failed is not None:
                    failed(error)
        except Exception as raised:
            error = raised
        if isinstance(error, asyncio.CancelledError):
            told.cancel()
        elif error is not None and not told.done():
            told.set_exception(error)
            # Whoever waited may be gone: a failure isn't to be reported for that.
            told.exception()
        # The error -> its traceback -> this frame -> who waits -> the error: nobody would look for
        # that circle for long, and the frames of the call that waited hang on it.
        del told, error

    def spawn(
        self,
        batch: WriteBatch,
        stored: Callable[[], object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Submit a batch that nobody waits for, as `submit` does; a failure is logged."""
        self.log(self.submit(batch, stored, failed))

    @staticmethod
    def log(told: asyncio.Future[Any]) -> None:
        """Nobody waits for what `submit` has returned: log it if it fails."""
        told.add_done_callback(_log_failure)

    def _note_failure(self, error: BaseException) -> None:
        """A change could not be stored."""
        self.num_failed += 1
        self._why = str(error)
        if isinstance(error, StoreFailedError):
            self.close()

    # --- what is owed

    def owe(self, put: Put[_Item], items: Iterable[_Item]) -> None:
        """Rows are to be stored again, as they are by then."""
        self._owe(self._rows, put, items)

    def store_again(self, put: Put[_Item], items: Iterable[_Item]) -> None:
        """Store rows as they are now, and owe them where there is no room for that."""
        if not self._is_over:
            self._store_rows({put: list(dict.fromkeys(items))})

    def owe_again(self, again: Again[_Item], items: Iterable[_Item]) -> None:
        """Something is to be tried again that stores what it does by itself."""
        self._owe(self._again, again, items)

    def _owe(
        self,
        queue: dict[Callable[..., Any], dict[Hashable, None]],
        what: Callable[..., Any],
        items: Iterable[Hashable],
    ) -> None:
        fresh = dict.fromkeys(items)
        if fresh and not self._is_over:
            queue.setdefault(what, {}).update(fresh)

    @property
    def num_owed(self) -> int:
        """What is owed: rows, and things to be tried again."""
        owed = (*self._rows.values(), *self._again.values())
        return sum(map(len, owed))

    def tick(self, now: float) -> None:
        """Try again to store what is owed, if it isn't too soon."""
        if now < self._next_retry or not (self._rows or self._again):
            return
        self._next_retry = now + RETRY_SECONDS
        self.num_retries += 1
        self._why = ""
        rows, self._rows = self._rows, {}
        again, self._again = self._again, {}
        if rows:
            self._store_rows({put: list(items) for put, items in rows.items()})
        for retry, items in again.items():
            retry(list(items))

    def _store_rows(self, rows: dict[Put[Any], list[Any]]) -> None:
        batch = self.batch()
        follow_ups = [put(batch, items) for put, items in rows.items()]

        def stored() -> None:
            for follow_up in follow_ups:
                if follow_up is not None:
                    follow_up()

        def failed(error: BaseException) -> None:
            for put, items in rows.items():
                self.owe(put, items)

        self.spawn(batch, stored, failed)

    def describe(self) -> str:
        """What could not be stored and is tried again, in words; empty when nothing is."""
        number = self.num_owed
        return f"{number} changes wait to be stored: {self._why}" if number and self._why else ""

    def close(self) -> None:
        """The buffer was deleted, or the store has failed: nothing is owed any more, or tried again.

        What is under way still ends as ever.
        """
        self._is_over = True
        self._rows.clear()
        self._again.clear()


def _log_failure(told: asyncio.Future[Any]) -> None:
    if not told.cancelled() and (error := told.exception()) is not None:
        _log.warning("work in the background failed: %s", error, exc_info=error)
