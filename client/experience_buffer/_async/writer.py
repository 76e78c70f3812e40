"""The async client's background writer: what becomes of one that nobody closes.

Written by hand, as `_sync/writer.py` is: an event loop that ends cancels its tasks, where a process that
ends has to be told of its threads.
"""

from __future__ import annotations

import asyncio

from experience_buffer._async.background_push import AsyncBackgroundPush, logger


class AsyncWriter(AsyncBackgroundPush):
    """Pushes in the background, in batches, keeping several under way.

    It belongs to one event loop; several tasks may share it. What the server refused, and other
    errors, are raised by the next `append`, `flush` or `close`. When the stream breaks, it
    reconnects and sends again what has no outcome yet, which is safe because pushes are idempotent.

    It has to be closed before its event loop ends, after which nothing can be sent: what isn't
    stored by then is logged as an error.
    """

    async def _run(self) -> None:
        try:
            await super()._run()
        except asyncio.CancelledError:
            # gRPC cancels the waiting task too when the channel is closed.
            if not self._done and (num_pending := self._queue.counts().num_pending):
                logger.error(
                    "a writer was open when its %s, close it before: %d experiences are not stored",
                    "client was closed" if self._client._is_closed else "event loop ended",
                    num_pending,
                )
            raise
