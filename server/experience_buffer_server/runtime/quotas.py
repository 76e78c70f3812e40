"""What one client, one buffer and all together may hold at once: calls, streams, waits, bytes.

A client is whom `callers` names: a token, a certificate, or an address that many workers may share.
So the defaults leave half of everything to the others, and bytes are shared by a rule instead of a
number: nobody may have more than is left for everybody else (the dynamic threshold of Choudhury and
Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998, with a factor of
1). Nobody has to know how many will share, and one alone gets half. What responses hold is counted by
the same rule; who waits for room there is in `response_bytes`.

Bytes are counted twice over. Clients share those that are read and committed, which takes moments.
Buffers share those that wait in line for room, which may take for ever: a buffer that is full must
keep nobody, its own clients least of all, from pushing to another.

Calls that need no grant, such as those for the server's health, are anybody's: they have few places
of their own, so that strangers never take what callers need.

Counts only: no I/O, no gRPC. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from experience_buffer import errors
from experience_buffer_server.settings.server import ServerSection

_BYTES_DELAY_SECONDS: Final = 0.1
"""Before a push comes again: a commit ends any moment."""
_CALLS_DELAY_SECONDS: Final = 1.0
"""Before a call, stream or push that would wait comes again: others end when they like."""
_MAX_ASKING: Final = 64
_MAX_ASKING_OF_ONE: Final = 4
"""Anonymous calls, of one address. They last for less than a millisecond, unless their peer is slow
on purpose; until its request is read, each can make gRPC hold twice `server.max_message_bytes`."""


class Report(Protocol):
    """Where refusals are counted; reasons are of a fixed few."""

    def push_refused(self, buffer: str, reason: str) -> None:
        """A push was told to come again."""

    def call_refused(self, reason: str) -> None:
        """A call or stream was told to come again."""


class Held:
    """How much of one kind is held, by name and in all."""

    def __init__(self) -> None:
        self.total = 0
        self.of: Counter[str] = Counter()

    def take(self, name: str, count: int = 1) -> None:
        """Count what somebody takes."""
        self.total += count
        self.of[name] += count

    def give_back(self, name: str, count: int = 1) -> None:
        """Count what somebody has given back."""
        self.total -= count
        self.of[name] -= count
        if not self.of[name]:
            del self.of[name]  # Names are the clients': they must not pile up.

    def left(self, count: int, most: int) -> int:
        """What all others would have of the most there may be, once this much more is taken."""
        return max(most - self.total - count, 0)

    def is_over_share(self, name: str, count: int, most: int) -> bool:
        """Whether somebody who has some already would have more than is left for all others."""
        have = self.of[name]
        return bool(have) and have + count > self.left(count, most)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most places that there are, for one client or for all."""

    reason: str
    """In metrics; one of a fixed few."""
    most: int
    """0: as many as anybody wants."""
    words: str
    """What a refusal says, of the `client`, `whose` are how many (`have`), and the `most`."""


class Places:
    """Places for one kind of calls or streams.

    Args:
        report: Where refusals are counted.
        of_one: What one client may hold.
        of_all: What all may; None: as much as they want.
    """

    def __init__(self, report: Report, of_one: Bound, of_all: Bound | None = None) -> None:
        self.held = Held()
        self._report = report
        self._of_one = of_one
        self._of_all = of_all

    def take(self, client: str) -> None:
        """Hold a place until it is given back.

        Raises:
            ResourceExhaustedError: There is none.
        """
        self._check(self._of_one, self.held.of[client], client, f"client {client!r} has")
        if self._of_all is not None:
            self._check(self._of_all, self.held.total, client, "there are")
        self.held.take(client)

    @contextmanager
    def within(self, client: str) -> Iterator[None]:
        """Hold a place for as long as the block takes.

        Raises:
            ResourceExhaustedError: There is none.
        """
        self.take(client)
        try:
            yield
        finally:
            self.held.give_back(client)

    def take_for(self, client: str, task: asyncio.Task[Any]) -> Callable[[], None]:
        """Hold a place until a task is done.

        Returns:
            What gives it back before that.

        Raises:
            ResourceExhaustedError: There is none.
        """
        self.take(client)

        def done(_: object = None) -> None:
            if task.remove_done_callback(done) or task.done():
                self.held.give_back(client)

        task.add_done_callback(done)
        return done

    def _check(self, bound: Bound, have: int, client: str, whose: str) -> None:
        if bound.most and have >= bound.most:
            self._report.call_refused(bound.reason)
            raise errors.ResourceExhaustedError(
                bound.words.format(client=client, whose=whose, have=have, most=bound.most),
                subject=client,
                retry_delay_seconds=_CALLS_DELAY_SECONDS,
            )


class Charge:
    """What one push holds; this one counts nothing. Not thread-safe."""

    def takes(self, num_bytes: int) -> None:
        """It was read: its experiences take so many bytes until they are committed.

        Raises:
            ResourceExhaustedError: With what else is under way these are too many.
        """

    def waits(self) -> None:
        """It waits in line for room: it holds its request, and nothing that was read.

        Raises:
            BufferFullError: Too much waits already; never for one that has waited.
        """

    def has_waited(self) -> None:
        """It is no longer in line."""


class _Counted(Charge):
    """The charge of a push from a client to a buffer."""

    def __init__(
        self, quotas: Quotas, client: str, buffer: str, num_bytes: int, max_of_buffer: int
    ) -> None:
        self._quotas = quotas
        self._client = client
        self._buffer = buffer
        self._num_bytes = num_bytes
        """Of the request: it is held as long as the push."""
        self._max_of_buffer = max_of_buffer
        self._pending = 0
        self._in_line = 0

    def takes(self, num_bytes: int) -> None:
        self._give_back()
        most = max(num_bytes, self._num_bytes)
        self._quotas._check_pending(self._client, self._buffer, most, self._max_of_buffer)
        self._quotas.pending_by_client.take(self._client, most)
        self._quotas.pending_by_buffer.take(self._buffer, most)
        self._pending = most

    def waits(self) -> None:
        self._give_back()
        if not self._in_line:
            self._quotas._check_line(self._buffer, self._num_bytes, self._max_of_buffer)
            self._quotas.line_by_buffer.take(self._buffer, self._num_bytes)
            self._in_line = self._num_bytes

    def has_waited(self) -> None:
        self._quotas.line_by_buffer.give_back(self._buffer, self._in_line)
        self._in_line = 0

    def end(self) -> None:
        """The push is answered."""
        self._give_back()
        self.has_waited()

    def _give_back(self) -> None:
        self._quotas.pending_by_client.give_back(self._client, self._pending)
        self._quotas.pending_by_buffer.give_back(self._buffer, self._pending)
        self._pending = 0


class Quotas:
    """Who holds how much. Not thread-safe."""

    def __init__(self, limits: ServerSection, report: Report) -> None:
        self._limits = limits
        self._report = report
        streams = (
            "{whose} {have} open streams, the limit server.%s is {most}; close some, send more on "
            "each, or raise the limit"
        )
        of_one, of_all = "max_streams_per_client", "max_streams"
        self.streams = Places(
            report,
            Bound(of_one, limits.max_streams_per_client, streams % of_one),
            Bound(of_all, limits.max_streams, streams % of_all),
        )
        """Streams that are open."""
        self.samples = Places(
            report,
            Bound(
                "max_waiting_samples_per_client",
                limits.max_waiting_samples_per_client,
                "client {client!r} waits in {have} sample calls and streams, the limit "
                "server.max_waiting_samples_per_client is {most}; use larger batches, or raise the "
                "limit",
            ),
        )
        """Sample calls, which may wait."""
        anonymous = max(limits.max_calls // 16, 1)
        self.calls = self._calls(
            "calls_per_client", of_one=max(limits.max_calls // 2, 1), of_all=limits.max_calls
        )
        """Of callers who have a grant, or need none because everyone may do everything. A call holds
        its place until gRPC is done with it: a peer that doesn't read its answer holds it, too."""
        self.asking = self._calls(
            "anonymous_calls",
            of_one=min(_MAX_ASKING_OF_ONE, anonymous),
            of_all=min(_MAX_ASKING, anonymous),
        )
        """Of anybody: short ones."""
        self.watching = self._calls(
            "anonymous_streams", of_one=max(anonymous // 4, 1), of_all=anonymous
        )
        """Of anybody: streams, which last."""
        self.pending_by_client = Held()
        self.pending_by_buffer = Held()
        """Bytes of pushes and annotations that are read and committed."""
        self.line_by_buffer = Held()
        """Bytes of pushes that wait in line for room."""

    def _calls(self, what: str, *, of_one: int, of_all: int) -> Places:
        words = (
            f"{{whose}} {{have}} calls under way, the limit for {what} is {{most}}, a part of "
            "server.max_calls; wait for their end, or raise the limit"
        )
        return Places(self._report, Bound(what, of_one, words), Bound(what, of_all, words))

    @contextmanager
    def pending(
        self, client: str, buffer: str, num_bytes: int, *, max_of_buffer: int
    ) -> Iterator[Charge]:
        """Hold the bytes of a push until it is answered.

        Args:
            client: Who pushes.
            buffer: Where to.
            num_bytes: Of the request.
            max_of_buffer: The most that the buffer takes at once, and lets wait, by its settings;
                0: no such limit.

        Raises:
            ResourceExhaustedError: Too much is under way. A single push always goes.
        """
        charge = _Counted(self, client, buffer, num_bytes, max_of_buffer)
        charge.takes(num_bytes)
        try:
            yield charge
        finally:
            charge.end()

    def _check_pending(self, client: str, buffer: str, num_bytes: int, max_of_buffer: int) -> None:
        most, clients = self._limits.max_pending_bytes, self.pending_by_client
        of_client = clients.of[client]
        max_of_client = self._limits.max_pending_bytes_per_client
        left = clients.left(num_bytes, most)
        for label, whose, have, limit, words in (
            (
                "max_pending_bytes",
                "pushes of",
                clients.total,
                most,
                f"the limit server.max_pending_bytes is {most}",
            ),
            (
                "max_pending_bytes_per_client",
                f"client {client!r} has",
                of_client,
                max_of_client or None,
                f"the limit server.max_pending_bytes_per_client is {max_of_client}",
            ),
            (
                "buffer_max_pending_bytes",
                f"buffer {buffer!r} has",
                self.pending_by_buffer.of[buffer],
                max_of_buffer or None,
                f"its limit max_pending_bytes is {max_of_buffer}",
            ),
            (
                "client_share",
                f"client {client!r} has",
                of_client,
                left,
                f"more than the {left} that would be left of server.max_pending_bytes = {most}",
            ),
        ):
            if limit is not None and have and have + num_bytes > limit:
                self._report.push_refused(buffer, label)
                raise errors.ResourceExhaustedError(
                    f"{whose} {have} bytes wait for their commit, {num_bytes} more are too many: "
                    f"{words}",
                    subject=buffer,
                    retry_delay_seconds=_BYTES_DELAY_SECONDS,
                )

    def _check_line(self, buffer: str, num_bytes: int, max_of_buffer: int) -> None:
        most, line = self._limits.max_pending_bytes // 2, self.line_by_buffer
        have, total = line.of[buffer], line.total
        if max_of_buffer and have and have + num_bytes > max_of_buffer:
            label, words = "buffer_max_pending_bytes", f"max_pending_bytes is {max_of_buffer}"
        elif line.is_over_share(buffer, num_bytes, most) or (total and total + num_bytes > most):
            label = "line_share"
            words = f"{total} wait in all, of {most}: half of server.max_pending_bytes"
        else:
            return
        self._report.push_refused(buffer, label)
        raise errors.BufferFullError(
            f"buffer {buffer!r} is full, and pushes of {have} bytes wait for room already, "
            f"{num_bytes} more are too many: {words}",
            subject=buffer,
            retry_delay_seconds=_CALLS_DELAY_SECONDS,
        )
