"""How many calls are under way: nobody's calls lock out the others'.

A client is whom `callers` names. Calls that need no grant, such as those for the server's health, are
anybody's: they have few places of their own, so that strangers never take what callers need. A call
holds its place until gRPC is done with it: a peer that doesn't read its answer holds it, too.

Counts only. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from experience_buffer import errors
from experience_buffer_server.runtime.quotas import Report

_DELAY_SECONDS = 1.0
"""Before a call comes again: others end when they like."""
_MAX_ASKING = 64
_MAX_ASKING_OF_ONE = 4
"""Anonymous calls, of one address. They last for less than a millisecond, unless their peer is slow
on purpose; until its request is read, each can make gRPC hold twice `server.max_message_bytes`."""


class Places:
    """Places for one kind of calls.

    Args:
        what: What they are, for messages and metrics; one of a fixed few.
        of_one: Places that one caller may hold.
        of_all: Places that there are.
        report: Where refusals are counted.
    """

    def __init__(self, what: str, *, of_one: int, of_all: int, report: Report) -> None:
        self.total = 0
        self.of: Counter[str] = Counter()
        self._what = what
        self._of_one = of_one
        self._of_all = of_all
        self._report = report

    def take(self, client: str, task: asyncio.Task[Any]) -> Callable[[], None]:
        """Hold a place until a task is done.

        Returns:
            What gives it back before that.

        Raises:
            ResourceExhaustedError: There is none.
        """
        if self.of[client] >= self._of_one or self.total >= self._of_all:
            raise self._refused(client)
        self.total += 1
        self.of[client] += 1

        def done(_: object = None) -> None:
            if task.remove_done_callback(done) or task.done():
                self._give_back(client)

        task.add_done_callback(done)
        return done

    def _give_back(self, client: str) -> None:
        self.total -= 1
        self.of[client] -= 1
        if not self.of[client]:
            del self.of[client]  # Names are the clients': they must not pile up.

    def _refused(self, client: str) -> errors.ResourceExhaustedError:
        self._report.call_refused(self._what)
        have, limit, whose = self.total, self._of_all, "there are"
        if self.of[client] >= self._of_one:
            have, limit, whose = self.of[client], self._of_one, f"client {client!r} has"
        return errors.ResourceExhaustedError(
            f"{whose} {have} calls under way, the limit for {self._what} is {limit}, a part of "
            "server.max_calls; wait for their end, or raise the limit",
            subject=client,
            retry_delay_seconds=_DELAY_SECONDS,
        )


class Crowd:
    """All calls of a server.

    Args:
        max_calls: The most that gRPC lets in at once.
        report: Where refusals are counted.
    """

    def __init__(self, max_calls: int, report: Report) -> None:
        anonymous = max(max_calls // 16, 1)
        self.calls = Places(
            "calls_per_client", of_one=max(max_calls // 2, 1), of_all=max_calls, report=report
        )
        """Of callers who have a grant, or need none because everyone may do everything."""
        self.asking = Places(
            "anonymous_calls",
            of_one=min(_MAX_ASKING_OF_ONE, anonymous),
            of_all=min(_MAX_ASKING, anonymous),
            report=report,
        )
        """Of anybody: short ones."""
        self.watching = Places(
            "anonymous_streams", of_one=max(anonymous // 4, 1), of_all=anonymous, report=report
        )
        """Of anybody: streams, which last."""
