"""What one client, one buffer and all together may hold at once: streams, waiting calls, bytes.

A client is whom `callers` names: a token, a certificate, or an address that many workers may share.
So the defaults leave half of everything to the others, and bytes are shared by a rule instead of a
number: nobody may have more than is left for everybody else (the dynamic threshold of Choudhury and
Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998, with a factor of
1). Nobody has to know how many will share, and one alone gets half.

Bytes are counted twice over. Clients share those that are read and committed, which takes moments.
Buffers share those that wait in line for room, which may take for ever: a buffer that is full must
keep nobody, its own clients least of all, from pushing to another.

Counts only: no I/O, no gRPC. Belongs to the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from experience_buffer import errors
from experience_buffer_server.settings.server import ServerSection

_BYTES_DELAY_SECONDS = 0.1
"""Before a push comes again: a commit ends any moment."""
_CALLS_DELAY_SECONDS = 1.0
"""Before a call, stream or push that would wait comes again: others end when they like."""


class Report(Protocol):
    """Where refusals are counted; reasons are of a fixed few."""

    def push_refused(self, buffer: str, reason: str) -> None:
        """A push was told to come again."""

    def call_refused(self, reason: str) -> None:
        """A call or stream was told to come again."""


class _Held:
    """How many of one kind are held, by name."""

    def __init__(self) -> None:
        self.total = 0
        self.of: Counter[str] = Counter()

    def take(self, name: str, count: int = 1) -> None:
        self.total += count
        self.of[name] += count

    def give_back(self, name: str, count: int = 1) -> None:
        self.total -= count
        self.of[name] -= count
        if not self.of[name]:
            del self.of[name]  # Names are the clients': they must not pile up.


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
        self._quotas._pending_by_client.take(self._client, most)
        self._quotas._pending_by_buffer.take(self._buffer, most)
        self._pending = most

    def waits(self) -> None:
        self._give_back()
        if not self._in_line:
            self._quotas._check_line(self._buffer, self._num_bytes, self._max_of_buffer)
            self._quotas._line_by_buffer.take(self._buffer, self._num_bytes)
            self._in_line = self._num_bytes

    def has_waited(self) -> None:
        self._quotas._line_by_buffer.give_back(self._buffer, self._in_line)
        self._in_line = 0

    def end(self) -> None:
        """The push is answered."""
        self._give_back()
        self.has_waited()

    def _give_back(self) -> None:
        self._quotas._pending_by_client.give_back(self._client, self._pending)
        self._quotas._pending_by_buffer.give_back(self._buffer, self._pending)
        self._pending = 0


class Quotas:
    """Who holds how much. Not thread-safe."""

    def __init__(self, limits: ServerSection, report: Report) -> None:
        self._limits = limits
        self._report = report
        self._streams = _Held()
        self._samples = _Held()
        self._pending_by_client = _Held()
        self._pending_by_buffer = _Held()
        self._line_by_buffer = _Held()

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return self._streams.total

    @property
    def pending_bytes(self) -> int:
        """Bytes of pushes and annotations that are read and committed."""
        return self._pending_by_client.total

    @property
    def waiting_bytes(self) -> int:
        """Bytes of pushes that wait in line for room."""
        return self._line_by_buffer.total

    @contextmanager
    def stream(self, client: str) -> Iterator[None]:
        """Hold an open stream.

        Raises:
            ResourceExhaustedError: There are too many.
        """
        limits, held = self._limits, self._streams
        for what, have, limit in (
            ("max_streams_per_client", held.of[client], limits.max_streams_per_client),
            ("max_streams", held.total, limits.max_streams),
        ):
            if limit and have >= limit:
                whose = f"client {client!r} has" if what.endswith("client") else "there are"
                raise self._refused_call(
                    what,
                    f"{whose} {have} open streams, the limit server.{what} is {limit}; close some, "
                    "send more on each, or raise the limit",
                    client,
                )
        held.take(client)
        try:
            yield
        finally:
            held.give_back(client)

    @contextmanager
    def waiting_sample(self, client: str) -> Iterator[None]:
        """Hold a sample call, which may wait.

        Raises:
            ResourceExhaustedError: The client has too many.
        """
        limit, have = self._limits.max_waiting_samples_per_client, self._samples.of[client]
        if limit and have >= limit:
            raise self._refused_call(
                "max_waiting_samples_per_client",
                f"client {client!r} waits in {have} sample calls and streams, the limit "
                f"server.max_waiting_samples_per_client is {limit}; use larger batches, or raise "
                "the limit",
                client,
            )
        self._samples.take(client)
        try:
            yield
        finally:
            self._samples.give_back(client)

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
        most, total = self._limits.max_pending_bytes, self.pending_bytes
        of_client = self._pending_by_client.of[client]
        max_of_client = self._limits.max_pending_bytes_per_client
        # What would be left for all others once this push is here.
        left = max(most - total - num_bytes, 0)
        for label, whose, have, limit, words in (
            (
                "max_pending_bytes",
                "pushes of",
                total,
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
                self._pending_by_buffer.of[buffer],
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
        most, total = self._limits.max_pending_bytes // 2, self.waiting_bytes
        have, left = self._line_by_buffer.of[buffer], max(most - total - num_bytes, 0)
        if max_of_buffer and have and have + num_bytes > max_of_buffer:
            label, words = "buffer_max_pending_bytes", f"max_pending_bytes is {max_of_buffer}"
        elif (have and have + num_bytes > left) or (total and total + num_bytes > most):
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

    def _refused_call(
        self, reason: str, message: str, client: str
    ) -> errors.ResourceExhaustedError:
        self._report.call_refused(reason)
        return errors.ResourceExhaustedError(
            message, subject=client, retry_delay_seconds=_CALLS_DELAY_SECONDS
        )
