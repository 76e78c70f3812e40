"""What the workers and trainers of a run share: calls made until they are answered."""

from __future__ import annotations

import threading
import time
import zlib
from typing import Any, Final, NamedTuple

import grpc

from experience_buffer import trxp
from experience_buffer.v1 import types_pb2

_AWAY: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # What no handler has accepted when a server stops; nobody here cancels a call.
    grpc.StatusCode.CANCELLED,
)
CALL_SECONDS: Final = 10.0
PAUSE: Final = threading.Event()
"""Never set: to wait for a while."""


_ADDED: Final = ("advantages", "returns")
"""Tensors that the server adds to what was pushed."""


class LostError(Exception):
    """The server doesn't have what a call is about, such as a lease that had ended.

    Args:
        details: In its words.
        retried: Whether attempts before had no answer.
    """

    def __init__(self, details: str, retried: bool = False) -> None:
        super().__init__(details)
        self.retried = retried


class Answer(NamedTuple):
    """A call that was answered."""

    message: Any
    began: float
    """When the attempt began that was answered, by `time.monotonic`."""
    retried: bool
    """Whether attempts before it had no answer: they may have done something."""


def ask(method: Any, request: Any) -> Answer:
    """Make a call until the server answers it.

    Raises:
        LostError: The server has no such lease, group or buffer.
    """
    retried = False
    while True:
        began = time.monotonic()
        try:
            message = method(request, timeout=CALL_SECONDS, wait_for_ready=True)
            return Answer(message, began, retried)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise LostError(error.details() or "", retried) from error
            full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if not full and error.code() not in _AWAY:
                raise
            retried |= not full
            PAUSE.wait(0.02)


def describe(one: types_pb2.SampledExperience) -> tuple[str, str, float | None, int]:
    """Uid, group, its advantage if it has any, and a checksum of what was pushed."""
    [item] = trxp.read(one.payload)
    assert isinstance(item, trxp.Item), item
    advantages = item.tensors.get("advantages")
    advantage = None
    if advantages is not None:
        values = set(memoryview(advantages.data).cast("B").cast("f"))
        assert len(values) == 1, f"advantages of {one.uid} differ: {values}"
        [advantage] = values
    for name in _ADDED:
        item.tensors.pop(name, None)
    # Written as its producer wrote it; without an addition these are the bytes as they came.
    pushed = item.encode() if advantages is not None else one.payload
    return one.uid, one.group, advantage, zlib.crc32(pushed)
