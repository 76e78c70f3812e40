"""Sample calls that their clients may give up: what such a call has leased is offered again at once.

A client may cancel a call while its answer is on the way. gRPC tells of that only while the answer hasn't
left; of the rest the client tells, by the number that it has given the call. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from experience_buffer import errors
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.runtime.callers import caller_of
from experience_buffer_server.sampling.leases import Lease

_MAX_KNOWN: Final = 16_384
"""Calls that are remembered, the newest ones: who gives one up says so within moments."""
_Key: TypeAlias = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class SampleCall:
    """One call."""

    task: asyncio.Task[Any] | None = None
    """Its handler, as long as that is at work."""
    buffer: Buffer | None = None
    lease: Lease | None = None
    """What it answers with."""
    is_given_up: bool = False
    """By its client, who doesn't make it again."""

    def leased(self, buffer: Buffer, lease: Lease) -> None:
        """This is its answer; a shared lease stays, since the other ranks have it, too."""
        if not lease.world_size:
            self.buffer, self.lease = buffer, lease

    def take_back(self) -> int:
        """Nobody gets its answer: end its wait, or offer again what it leased; how many that is."""
        if self.task is not None:
            self.task.cancel()
        buffer, lease = self.buffer, self.lease
        self.buffer = self.lease = None
        if buffer is None or lease is None or lease.state != "open":
            return 0
        buffer.give_back([lease.id], "cancelled")
        return lease.num_experiences


class SampleCalls:
    """The calls that may be given up, by caller, buffer and number. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, SampleCall] = OrderedDict()

    @contextmanager
    def entered(self, buffer: str, number: int) -> Iterator[SampleCall]:
        """For the time of its handler, one call; 0 is no number.

        One that comes again, since the client hasn't had its answer, takes the place of the one before.

        Raises:
            CallCancelledError: It was given up, perhaps before it came.
        """
        call, key = SampleCall(asyncio.current_task()), (caller_of(), buffer, number)
        if number:
            if (before := self._known.pop(key, None)) is not None:
                if before.is_given_up:
                    raise _given_up()
                before.take_back()
            self._note(key, call)
        try:
            yield call
        except asyncio.CancelledError:
            if call.is_given_up or self._known.get(key, call) is not call:
                raise _given_up() from None
            raise
        finally:
            call.task = None

    def give_up(self, buffer: str, number: int) -> int:
        """A client has given up a call, which may not have come yet; see `SampleCall.take_back`."""
        key = (caller_of(), buffer, number)
        if (call := self._known.get(key)) is None:
            self._note(key, SampleCall(is_given_up=True))
            return 0
        call.is_given_up = True
        return call.take_back()

    def _note(self, key: _Key, call: SampleCall) -> None:
        self._known[key] = call
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _given_up() -> errors.CallCancelledError:
    return errors.CallCancelledError("its client has given this call up, or made it again")
