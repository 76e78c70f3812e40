"""How many bytes of responses may be under way: read from the store, and not taken by their readers.

A reader that stands still keeps what is sent to it in memory. So whoever assembles a response holds
its bytes until it is sent. They are shared as those of pushes are (see `quotas`): nobody may have more
under way than is left for everybody else, and who has nothing under way gets in as long as there is
room at all.

What is larger than a quarter of all counts as a quarter. So the largest batch goes, too, while others
stand still for ever, and at most four such are in memory.

Counts only: no I/O, no gRPC. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Final

from experience_buffer import errors
from experience_buffer_server.runtime.quotas import Held, Report
from experience_buffer_server.settings.server import ServerSection

_DELAY_SECONDS: Final = 0.1
"""Before a call comes again: responses leave any moment."""
_LARGEST_SHARE: Final = 4
_Waiter = tuple[int, "asyncio.Future[Hold]"]


class Hold:
    """Bytes that a client holds, until they are released; releasing twice does no harm."""

    __slots__ = ("_client", "_num_bytes", "_responses")

    def __init__(self, owner: Responses, client: str, num_bytes: int) -> None:
        self._responses = owner
        self._client = client
        self._num_bytes = num_bytes

    def keep(self, num_bytes: int) -> None:
        """Release what is more than this: it is in memory no more."""
        rest = self._num_bytes - num_bytes
        if rest > 0:
            self._num_bytes = num_bytes
            self._responses.give_back(self._client, rest)

    def release(self) -> None:
        """The response is sent, or never will be."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._responses.give_back(self._client, num_bytes)


class Responses:
    """Who holds how many bytes of responses. Not thread-safe."""

    def __init__(self, limits: ServerSection, report: Report) -> None:
        self._most = limits.max_response_bytes
        self._report = report
        self.held = Held()
        """Bytes under way, by client."""
        self._waiting: dict[str, deque[_Waiter]] = {}
        """By client, those served last at the end."""

    def take(self, client: str, num_bytes: int) -> Hold:
        """Hold the bytes of a response.

        Raises:
            ResourceExhaustedError: Too much is under way.
        """
        num_bytes = self._counted(num_bytes)
        if client in self._waiting or not self._fits(client, num_bytes):
            raise self._refusal(client, num_bytes)
        return self._take(client, num_bytes)

    async def wait(self, client: str, num_bytes: int, *, deadline: float = math.inf) -> Hold:
        """Hold the bytes of a response as soon as they fit; first come, first served, of one client.

        Args:
            client: Who reads it.
            num_bytes: Its size.
            deadline: By `time.monotonic`.

        Raises:
            ResourceExhaustedError: Too much is under way until the deadline.
        """
        num_bytes = self._counted(num_bytes)
        if client not in self._waiting and self._fits(client, num_bytes):
            return self._take(client, num_bytes)
        turn: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()
        waiter = num_bytes, turn
        self._waiting.setdefault(client, deque()).append(waiter)
        seconds = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
        try:
            await asyncio.wait((turn,), timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                turn.result().release()
            else:
                self._give_up(client, waiter)
            raise
        if not turn.done():
            self._give_up(client, waiter)
            raise self._refusal(client, num_bytes)
        return turn.result()

    def _give_up(self, client: str, waiter: _Waiter) -> None:
        self._leave(client, waiter)
        self._look()  # Those behind it may want less.

    def give_back(self, client: str, num_bytes: int) -> None:
        """Bytes aren't held any more; those who wait may be next."""
        self.held.give_back(client, num_bytes)
        self._look()

    def _look(self) -> None:
        """Serve the first of each client in turn, as long as there is room."""
        is_served = True
        while is_served:
            is_served = False
            for client in list(self._waiting):
                num_bytes, turn = waiter = self._waiting[client][0]
                if self._fits(client, num_bytes):
                    is_served = True
                    self._leave(client, waiter)
                    turn.set_result(self._take(client, num_bytes))

    def _leave(self, client: str, waiter: _Waiter) -> None:
        waiters = self._waiting.pop(client)
        waiters.remove(waiter)
        if waiters:
            self._waiting[client] = waiters

    def _take(self, client: str, num_bytes: int) -> Hold:
        self.held.take(client, num_bytes)
        return Hold(self, client, num_bytes)

    def _counted(self, num_bytes: int) -> int:
        return max(min(num_bytes, self._most // _LARGEST_SHARE), 1)

    def _fits(self, client: str, num_bytes: int) -> bool:
        held, most = self.held, self._most
        return held.total + num_bytes <= most and not held.is_over_share(client, num_bytes, most)

    def _refusal(self, client: str, num_bytes: int) -> errors.ResourceExhaustedError:
        self._report.call_refused("max_response_bytes")
        return errors.ResourceExhaustedError(
            f"{self.held.total} bytes of responses wait to be sent, {self.held.of[client]} of "
            f"them to client {client!r}, and {num_bytes} more are too many: the limit "
            f"server.max_response_bytes is {self._most}, and nobody may have more of it than is left "
            "for others; read what was sent, or raise the limit",
            subject=client,
            retry_delay_seconds=_DELAY_SECONDS,
        )
