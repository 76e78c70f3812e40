"""The sync client's background writer: what becomes of one that nobody closes.

Written by hand, as `_async/writer.py` is: a process that ends has to be told of its threads, where an
event loop that ends cancels its tasks.
"""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize
from typing import Final

from experience_buffer._sync.background_push import BackgroundPush, logger
from experience_buffer.errors import ExperienceBufferError, PushRefusedError

_EXIT_SECONDS: Final = 10.0
"""For what is still under way when the process ends."""


class Writer(BackgroundPush):
    """Pushes in the background, in batches, keeping several under way.

    It can be shared between threads. What the server refused, and other errors, are raised by
    the next `append`, `flush` or `close`. When the stream breaks, it reconnects and sends again
    what has no outcome yet, which is safe because pushes are idempotent.

    It belongs to the process that uses it first: in one that is forked off after that it can't be
    used any more.

    One that is still open when the process ends by itself is closed then, for which it has 10
    seconds at most, and after Ctrl-C no longer than a server takes what is queued; what is not stored
    by then is logged as an error.
    """

    _at_exit: Finalize | None = None

    def _began(self) -> None:
        # Also called in processes that multiprocessing has started, unlike `atexit`, and never
        # in one that was forked since.
        self._at_exit = Finalize(None, self._close_at_exit, exitpriority=0)

    def _ended(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()

    def _close_at_exit(self) -> None:
        ended_by = getattr(sys, "last_value", None)
        if isinstance(ended_by, KeyboardInterrupt):
            self._leave(ended_by)
            return
        try:
            self.close(timeout=min(self._client.timeout, _EXIT_SECONDS))
        except ExperienceBufferError as error:
            # One that holds nothing may have lost its client before.
            num_pending = self.counts.num_pending
            if num_pending or isinstance(error, PushRefusedError):
                logger.error(
                    "a writer was open when the process ended, close it before: %d experiences are "
                    "not stored: %s",
                    num_pending,
                    error,
                )
