"""A writer's bounded queue: what waits, what is under way, what went wrong. Pure.

No thread, no I/O: `background_push.py` of either client holds a lock around it and moves its
requests over a stream.

    add -> waiting -> next_request -> under way -> answered: settled
                         ^                |
                         +--- rewind / postpone / divide (broken stream, retry later, less at once)
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from experience_buffer import status
from experience_buffer._messages import convert, push_bytes, push_split
from experience_buffer._messages.push_bytes import Payload
from experience_buffer.errors import (
    DeadlineExceededError,
    ExperienceBufferError,
    InternalServerError,
    ResourceExhaustedError,
    TrxpError,
)
from experience_buffer.options import WriterOptions
from experience_buffer.outcomes import PushOutcome, PushResult, refusal
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer.values import WriterCounts

logger = logging.getLogger("experience_buffer")

MAX_KEPT_REFUSALS: Final = 1000
"""Refused outcomes kept for the next call to raise; more are only counted."""
_MOST_SECONDS: Final = 3600.0
"""Of a wait: locks can't count any number."""
_FEWER_SECONDS: Final = 30.0
"""For how long requests stay as small as they had to become: limits may be raised meanwhile."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An encoded payload, not yet in a request."""

    payload: Payload
    start: int
    """Position of its first experience, counted since the writer was opened."""
    num_items: int
    time: float
    """When it came, by the queue's clock."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request under way; kept until it is answered, so that it can be sent again."""

    sequence: int
    fields: bytes
    """Of `push_bytes.push_fields`."""
    payloads: Sequence[Payload]
    positions: range
    """Of its experiences, counted since the writer was opened."""
    num_bytes: int
    """Of all payloads."""

    def message(self) -> bytes:
        """The `PushStreamRequest` to send: a copy of the payloads, not to be made under a lock."""
        return push_bytes.push_stream_request(
            self.sequence, self.fields, [(payload,) for payload in self.payloads]
        )


class PushQueue:
    """The state of one writer.

    Args:
        buffer: Where to push.
        group_size: Expected members of every group pushed; 0: the buffer's default.
        options: Limits.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        buffer: str,
        group_size: int,
        options: WriterOptions,
        clock: Callable[[], float],
    ) -> None:
        self.fields = push_bytes.push_fields(buffer=buffer, group_size=group_size)
        """Everything of a request but its payloads."""
        self._options = options
        self._clock = clock
        self._waiting: deque[Piece] = deque()
        self._waiting_items = 0
        self._waiting_bytes = 0
        self._resend: deque[int] = deque()
        self._under_way: dict[int, Request] = {}
        self._under_way_bytes = 0
        self._next_sequence = 1
        self._not_before = 0.0
        self._most = options.max_batch_items
        self._most_until = 0.0
        self._hurry_until = 0
        self._refused: list[PushOutcome] = []
        self._errors: list[ExperienceBufferError] = []
        self.num_appended = 0
        self.num_stored = 0
        self.num_duplicates = 0
        self.num_refused = 0
        self.num_failed = 0
        self.last_delay: ExperienceBufferError | None = None
        """Why the server asked to send something later; None since the last success."""

    def counts(self) -> WriterCounts:
        """What became of the experiences added so far."""
        return WriterCounts(
            num_appended=self.num_appended,
            num_stored=self.num_stored,
            num_duplicates=self.num_duplicates,
            num_refused=self.num_refused,
            num_failed=self.num_failed,
        )

    @property
    def pending_bytes(self) -> int:
        """Payload bytes that have no outcome yet."""
        return self._waiting_bytes + self._under_way_bytes

    @property
    def most_items(self) -> int:
        """Experiences of one request; fewer than the options say once so many were too much."""
        return self._most if self._clock() < self._most_until else self._options.max_batch_items

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many more bytes fit; an empty queue takes a payload of any size."""
        pending = self.pending_bytes
        return pending == 0 or pending + num_bytes <= self._options.max_pending_bytes

    def add(self, payload: Payload, num_items: int) -> bool:
        """Queue one encoded payload; whether this changes when there is something to send."""
        was_empty = not self._waiting
        piece = Piece(payload, self.num_appended, num_items, self._clock())
        self._waiting.append(piece)
        self._waiting_items += num_items
        self._waiting_bytes += len(payload)
        self.num_appended += num_items
        return was_empty or self._is_due()

    def refuse(self, outcome: PushOutcome) -> None:
        """Count an experience that can't be sent, instead of adding it."""
        outcome = dataclasses.replace(outcome, index=self.num_appended)
        self.num_appended += 1
        self._note_refusal(outcome)

    def hurry(self) -> int:
        """Send everything added so far without lingering; the mark for `is_settled`."""
        self._hurry_until = self.num_appended
        return self.num_appended

    def is_settled(self, mark: int) -> bool:
        """Whether everything added before the mark has an outcome."""
        first_waiting = self._waiting[0].start if self._waiting else self.num_appended
        first_sent = min((sent.positions.start for sent in self._under_way.values()), default=mark)
        return min(first_waiting, first_sent) >= mark

    def next_request(self) -> Request | None:
        """The request to send now, if any; it is under way from here on."""
        if self._clock() < self._not_before:
            return None
        while self._resend:
            sent = self._under_way.get(self._resend.popleft())
            if sent is not None:
                return sent
        return self._form_request() if self._is_due() else None

    def seconds_until_next(self) -> float | None:
        """How long until `next_request` may have one without anything else happening; None: never."""
        now = self._clock()
        if now < self._not_before:
            return self._not_before - now
        if self._resend:
            return 0.0
        if not self._waiting:
            return None
        if self._is_due():
            return 0.0
        left = self._waiting[0].time + self._options.linger_seconds - now
        return min(max(left, 0.0), _MOST_SECONDS)

    def answered(
        self, message: service_pb2.PushStreamResponse, *, delay: float
    ) -> Sequence[Payload]:
        """Note the answer to a request.

        Args:
            message: The answer. One to a request that was answered before is ignored.
            delay: Seconds after which a request that the server postponed is sent again, unless
                the server asked for more.

        Returns:
            The payloads that have their outcome now; none where the request is to be sent again.
        """
        if message.sequence not in self._under_way:
            return ()
        if message.WhichOneof("result") == "error":
            error = status.from_request_error(message.error)
            if error.retry_delay_seconds is not None:
                self.last_delay = error
                self._not_before = self._clock() + max(delay, error.retry_delay_seconds)
                return self._postponed(message.sequence, error)
            return self._failed(message.sequence, error)
        self.last_delay = None
        outcomes = message.response.outcomes
        num_items = len(self._under_way[message.sequence].positions)
        if len(outcomes) != num_items:
            return self._fail(
                message.sequence,
                InternalServerError(f"{num_items} items pushed, {len(outcomes)} outcomes received"),
            )
        sent = self._pop(message.sequence)
        for position, outcome in zip(sent.positions, outcomes, strict=True):
            if outcome.status == types_pb2.PUSH_STATUS_STORED:
                self.num_stored += 1
            elif outcome.status == types_pb2.PUSH_STATUS_DUPLICATE:
                self.num_duplicates += 1
            else:
                self._note_refusal(convert.outcome(outcome, position))
        return sent.payloads

    def rewind(self) -> None:
        """The stream broke: send everything unanswered again, in the order of the first time."""
        self._resend = deque(sorted(self._under_way, key=self._place))

    def broke(self, error: ExperienceBufferError) -> Sequence[Payload] | None:
        """The stream broke by an error for all of it, which may mean the largest request alone.

        Returns:
            None where that can't be; else what `answered` returns, and the stream is to be opened again.
        """
        if not self._under_way or not push_split.may_go_in_parts(error):
            return None
        largest = max(self._under_way.values(), key=lambda sent: sent.num_bytes)
        return self._failed(largest.sequence, error)

    def take_error(self, late: ExperienceBufferError | None = None) -> ExperienceBufferError | None:
        """What went wrong since the last call, as one error; None when nothing did.

        Args:
            late: One more, which comes as a note where something else went wrong.
        """
        found: list[ExperienceBufferError] = self._errors
        if self._refused:
            found.append(refusal(PushResult(outcomes=tuple(self._refused), policy_version=None)))
        if late is not None:
            found.insert(1, late)
        self._errors, self._refused = [], []
        if not found:
            return None
        for other in found[1:10]:
            found[0].add_note(f"and: {other}")
        return found[0]

    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        oldest = self._waiting[0]
        return (
            oldest.start < self._hurry_until
            or self._waiting_items >= self.most_items
            or self._waiting_bytes >= self._options.max_batch_bytes
            or self._clock() - oldest.time >= self._options.linger_seconds
        )

    def _form_request(self) -> Request:
        start = self._waiting[0].start
        payloads: list[Payload] = []
        num_items = num_bytes = 0
        most = self.most_items
        while self._waiting:
            piece = self._waiting[0]
            if payloads and (
                piece.start != start + num_items
                or num_items + piece.num_items > most
                or num_bytes + len(piece.payload) > self._options.max_batch_bytes
            ):
                break
            payloads.append(self._waiting.popleft().payload)
            num_items += piece.num_items
            num_bytes += len(piece.payload)
        self._waiting_items -= num_items
        self._waiting_bytes -= num_bytes
        return self._begin(payloads, range(start, start + num_items))

    def _begin(self, payloads: Sequence[Payload], positions: range) -> Request:
        num_bytes = sum(map(len, payloads))
        request = Request(self._next_sequence, self.fields, payloads, positions, num_bytes)
        self._under_way[request.sequence] = request
        self._under_way_bytes += num_bytes
        self._next_sequence += 1
        return request

    def _place(self, sequence: int) -> int:
        return self._under_way[sequence].positions.start

    def _send_again(self, sequence: int) -> None:
        waiting = [each for each in self._resend if each in self._under_way]
        bisect.insort(waiting, sequence, key=self._place)
        self._resend = deque(waiting)

    def _failed(self, sequence: int, error: ExperienceBufferError) -> Sequence[Payload]:
        """Send the same in two requests; where that can't help, count it as failed or refused."""
        sent = self._under_way[sequence]
        if not push_split.may_go_in_parts(error):
            return self._fail(sequence, error)
        try:
            each = push_split.singles(sent.payloads, len(sent.positions))
        except TrxpError:
            return self._fail(sequence, error)
        if len(each) == 1:
            self._pop(sequence)
            place = sent.positions.start
            self._note_refusal(push_split.refused(place, error, push_split.uid_in(each[0])))
            return sent.payloads
        self._most = (len(each) + 1) // 2
        self._most_until = self._clock() + _FEWER_SECONDS
        return self._in_two(sequence, each)

    def _postponed(self, sequence: int, error: ExperienceBufferError) -> Sequence[Payload]:
        """Send it after the delay: the oldest in two requests, since there may be room for one.

        Whoever samples may wait for the one that fits. The others wait behind it as they are.
        """
        sent = self._under_way[sequence]
        is_oldest = sent.positions.start == min(map(self._place, self._under_way))
        is_of_singles = len(sent.payloads) == len(sent.positions) > 1
        if is_oldest and is_of_singles and isinstance(error, ResourceExhaustedError):
            return self._in_two(sequence, sent.payloads)
        self._send_again(sequence)
        return ()

    def _in_two(self, sequence: int, each: Sequence[Payload]) -> Sequence[Payload]:
        """Send the same in two requests; the payloads that are settled by it."""
        sent, middle = self._pop(sequence), (len(each) + 1) // 2
        for part in (slice(middle), slice(middle, None)):
            self._send_again(self._begin(each[part], sent.positions[part]).sequence)
        return () if each is sent.payloads else sent.payloads

    def _fail(self, sequence: int, error: ExperienceBufferError) -> Sequence[Payload]:
        sent = self._pop(sequence)
        self.num_failed += len(sent.positions)
        self._errors.append(error)
        return sent.payloads

    def _pop(self, sequence: int) -> Request:
        sent = self._under_way.pop(sequence)
        self._under_way_bytes -= sent.num_bytes
        return sent

    def _note_refusal(self, outcome: PushOutcome) -> None:
        self.num_refused += 1
        logger.warning("%s refused: %s: %s", outcome.uid, outcome.reason, outcome.message)
        if self._options.raise_on_refused and len(self._refused) < MAX_KEPT_REFUSALS:
            self._refused.append(outcome)


def full_error(queue: PushQueue, num_queued: int, num_given: int) -> DeadlineExceededError:
    """Make the error of an `append` that found no room in time."""
    return DeadlineExceededError(
        f"the writer's queue stayed full: {queue.pending_bytes} bytes wait for their outcome; "
        f"{num_queued} of {num_given} experiences were queued{_why(queue)}. "
        "Append slower, or raise timeout or max_pending_bytes"
    )


def flush_error(queue: PushQueue, seconds: float) -> DeadlineExceededError:
    """Make the error of a `flush` that ended before everything had its outcome."""
    return DeadlineExceededError(
        f"{queue.counts().num_pending} experiences have no outcome after {seconds} s"
        f"{_why(queue)}. Flush again, or give it more time with timeout="
    )


def _why(queue: PushQueue) -> str:
    return f"; the server says: {queue.last_delay}" if queue.last_delay else ""
