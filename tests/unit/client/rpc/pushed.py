"""What these tests push, and what the scripted server was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from experience_buffer import EID, ClientOptions, Experience, RetryOptions, trxp

FAST = ClientOptions(
    retry=RetryOptions(initial_backoff_seconds=0.01, max_backoff_seconds=0.05, reconnect_seconds=20)
)


def experience(run: int, length: int = 7) -> Experience:
    return Experience(
        eid=EID(3, 5, run, 0, "abcdef"),
        tokens=list(range(length)),
        logprobs=[0.5] * (length - 2),
        prompt_length=2,
        reward=float(run),
    )


def payload(run: int) -> bytes:
    return trxp.encode([experience(run)])


def of_kind(script: Any, kind: type) -> list[Any]:
    return [request for request in script.requests if isinstance(request, kind)]


def item_of(payload: bytes) -> trxp.Item:
    """The one experience of a payload."""
    [item] = trxp.read(payload)
    assert isinstance(item, trxp.Item)
    return item


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        threading.Event().wait(0.002)


async def acquired(semaphore: Any) -> bool:
    return await asyncio.to_thread(semaphore.acquire, timeout=10)
