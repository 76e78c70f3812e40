"""What has left a buffer and waits to be archived, as callers ask for it."""

from __future__ import annotations

from collections.abc import Iterable

from experience_buffer_server.buffer.buffer import Buffer


def count(buffer: Buffer) -> int:
    """Experiences that have left and wait to be archived."""
    return len(buffer.state.outbox)


def find(buffer: Buffer, uid: str) -> int | None:
    """The number of what has left under a uid and waits to be archived; None: nothing does."""
    return buffer.state.outbox.waits(uid)


async def forget(buffer: Buffer, uids: Iterable[str]) -> int:
    """Remove for good what has left and waits to be archived; how many. What is being written stays."""
    return await buffer.state.outbox.discard(uids)
