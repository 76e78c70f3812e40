"""Small batches that wait for an append to be committed with.

A commit of its own, however small, is one that some append has to wait for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experience_buffer_server.store.batch import WriteBatch

_RIDE_SECONDS = 0.02
"""For how long a batch waits for an append that it can commit with."""


@dataclass(slots=True, eq=False)
class Rider:
    """A batch that waits for an append to commit with."""

    batch: WriteBatch
    done: asyncio.Future[None]

    def arrive(self, submitted: asyncio.Future[Any]) -> None:
        """The commit that it is part of has ended."""
        if self.done.done():
            return
        if submitted.cancelled():
            self.done.cancel()
        elif (error := submitted.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Riders:
    """Those of one store, in order. Not thread-safe; belongs to its event loop.

    Args:
        submit: Submits a batch now.
    """

    def __init__(self, submit: Callable[[WriteBatch], asyncio.Future[Any]]) -> None:
        self._submit = submit
        self._append_time = -math.inf
        """When an experience was last appended, by `time.monotonic`."""
        self._waiting: list[Rider] = []

    @property
    def are_picked_up(self) -> bool:
        """Whether experiences are being appended now: who waits won't wait in vain."""
        return time.monotonic() - self._append_time <= _RIDE_SECONDS

    def wait(self, batch: WriteBatch) -> asyncio.Future[None]:
        """Wait for an append, but not for long; the future ends with the commit."""
        loop = asyncio.get_running_loop()
        rider = Rider(batch, loop.create_future())
        self._waiting.append(rider)
        loop.call_later(_RIDE_SECONDS, self._wait_no_longer, rider)
        return rider.done

    def board(self, batch: WriteBatch) -> list[Rider]:
        """Let an append take along all who wait, before its own operations; who they are."""
        self._append_time = time.monotonic()
        riders, self._waiting = self._waiting, []
        batch.operations[:0] = [op for rider in riders for op in rider.batch.operations]
        # They were numbered before: of one buffer the last number counts.
        for rider in reversed(riders):
            batch.numbers = rider.batch.numbers | batch.numbers
        return riders

    def dismount(self) -> None:
        """Submit what waits for an append on its own, before anything else is submitted."""
        riders, self._waiting = self._waiting, []
        for rider in riders:
            self._submit(rider.batch).add_done_callback(rider.arrive)

    def _wait_no_longer(self, rider: Rider) -> None:
        if rider in self._waiting:
            self.dismount()
