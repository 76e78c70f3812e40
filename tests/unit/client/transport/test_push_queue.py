from __future__ import annotations

from typing import Any

import pytest

from experience_buffer._transport.push_queue import PushQueue, Request
from experience_buffer.errors import InternalServerError, InvalidRequestError, PushRefusedError
from experience_buffer.options import WriterOptions
from experience_buffer.v1 import service_pb2, types_pb2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**options: Any) -> tuple[PushQueue, Clock]:
    clock = Clock()
    options_of = WriterOptions(**options)
    return PushQueue(buffer="math", group_size=7, options=options_of, clock=clock), clock


def sent(queue: PushQueue, *payloads: bytes, num_items: int = 1) -> list[Request | None]:
    """Each in a request of its own, which is under way."""
    requests = []
    for payload in payloads:
        queue.add(payload, num_items)
        requests.append(queue.next_request())
    return requests


def parsed(request: Request | None) -> service_pb2.PushStreamRequest:
    assert request is not None
    return service_pb2.PushStreamRequest.FromString(request.message())


def answer(sequence: int, *statuses: int) -> service_pb2.PushStreamResponse:
    message = service_pb2.PushStreamResponse(sequence=sequence)
    message.response.SetInParent()
    for index, status in enumerate(statuses):
        message.response.outcomes.add(index=index, uid=f"u{index}", status=status)
    return message


def failure(sequence: int, code: int, delay: float) -> service_pb2.PushStreamResponse:
    error = types_pb2.RequestError(code=code, message="text", retry_delay_seconds=delay)
    return service_pb2.PushStreamResponse(sequence=sequence, error=error)


def test_waits_for_company_then_goes() -> None:
    queue, clock = make(linger_seconds=0.5)
    assert queue.seconds_until_next() is None
    queue.add(b"a", 1)
    clock.now += 0.2
    queue.add(b"b", 1)
    assert queue.next_request() is None
    assert queue.seconds_until_next() == pytest.approx(0.3)
    clock.now += 0.3
    assert parsed(queue.next_request()) == service_pb2.PushStreamRequest(
        sequence=1,
        push=service_pb2.PushRequest(buffer="math", payload=b"a", payloads=[b"b"], group_size=7),
    )
    assert queue.next_request() is None


def test_goes_at_once_when_full_by_count_or_by_bytes() -> None:
    queue, _ = make(linger_seconds=60, max_batch_items=3, max_batch_bytes=11)
    queue.add(b"a", 2)
    queue.add(b"b", 1)
    queue.add(b"c" * 12, 1)
    queue.add(b"d" * 6, 4)
    queue.add(b"e" * 6, 3)
    payloads = []
    while (request := queue.next_request()) is not None:
        payloads.append(request.payloads)
    assert payloads == [[b"a", b"b"], [b"c" * 12], [b"d" * 6], [b"e" * 6]]


def test_says_when_who_sends_must_look_again() -> None:
    queue, clock = make(linger_seconds=5, max_batch_items=5, max_batch_bytes=11)
    assert queue.add(b"a", 2), "it may linger from now on"
    assert not queue.add(b"b", 2)
    assert queue.add(b"c", 1), "full by count"
    assert queue.next_request() is not None
    assert queue.add(b"d", 1)
    assert queue.add(b"e" * 10, 1), "full by bytes"
    assert queue.next_request() is not None
    assert queue.add(b"f", 1)
    clock.now += 5
    assert queue.add(b"g", 1), "it has lingered"
    assert queue.next_request() is not None
    assert queue.add(b"h", 1)
    queue.hurry()
    assert queue.add(b"i", 1), "someone flushes"


def test_room_is_given_back_by_answers_only() -> None:
    queue, _ = make(linger_seconds=0, max_pending_bytes=10)
    assert queue.has_room(1000)
    queue.add(b"x" * 7, 1)
    assert queue.has_room(3)
    assert not queue.has_room(4)
    assert queue.next_request() is not None
    assert not queue.has_room(4)
    queue.answered(answer(1, 1), delay=0)
    assert queue.has_room(4)
    assert queue.pending_bytes == 0


def test_payloads_are_given_back_with_their_outcome() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=2)
    for payload in (b"a", b"b", b"c", b"d", b"e"):
        queue.add(payload, 1)
    for _ in range(3):
        assert queue.next_request() is not None
    assert queue.answered(failure(1, 8, 2.5), delay=0) == (), "it is sent again"
    assert queue.answered(failure(2, 3, 0), delay=0) == [b"c", b"d"]
    assert queue.answered(answer(3, 1, 1), delay=0) == [b"e"], "too many outcomes"
    clock.now += 3
    assert queue.next_request() is not None
    assert queue.answered(answer(1, 1, 3), delay=0) == [b"a", b"b"]
    assert queue.answered(answer(1, 1, 1), delay=0) == (), "it was answered before"


def test_flush_waits_for_what_came_before_and_not_for_what_comes_after() -> None:
    queue, _ = make(linger_seconds=60)
    queue.add(b"a", 2)
    mark = queue.hurry()
    queue.add(b"b", 1)
    first = queue.next_request()
    assert first is not None
    queue.add(b"c", 1)
    assert not queue.is_settled(mark)
    queue.answered(answer(1, *[1] * len(first.positions)), delay=0)
    assert queue.is_settled(mark)


def test_rewind_sends_the_unanswered_again_in_order() -> None:
    queue, _ = make(linger_seconds=0, max_batch_items=1)
    first, _, third = sent(queue, b"a", b"b", b"c")
    queue.answered(answer(2, 1), delay=0)
    queue.rewind()
    assert [queue.next_request() for _ in range(3)] == [first, third, None]
    for again in (answer(1, 2), answer(2, 1), answer(3, 1)):
        queue.answered(again, delay=0)
    counts = queue.counts()
    assert (counts.num_stored, counts.num_duplicates, counts.num_pending) == (2, 1, 0)


def test_postponed_request_holds_everything_back_for_the_delay() -> None:
    queue, clock = make(linger_seconds=0)
    [request] = sent(queue, b"a")
    queue.add(b"b", 1)
    queue.answered(failure(1, 8, 2.5), delay=0.1)
    assert queue.next_request() is None
    assert queue.seconds_until_next() == pytest.approx(2.5)
    assert queue.last_delay is not None
    clock.now += 2.5
    assert queue.next_request() == request
    queue.answered(answer(1, 1), delay=0)
    assert queue.last_delay is None
    assert queue.take_error() is None


def test_postponed_requests_go_again_in_the_order_of_the_first_time() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=1)
    first, _, *others = sent(queue, b"a", b"b", b"c", b"d")
    queue.answered(answer(2, 1), delay=0)
    for sequence in (1, 3, 4):
        queue.answered(failure(sequence, 8, 1), delay=0)
    clock.now += 1
    assert [queue.next_request() for _ in range(4)] == [first, *others, None]


def test_what_is_late_is_raised_alone_or_noted() -> None:
    queue, _ = make(linger_seconds=0, max_batch_items=1)
    late = InternalServerError("late")
    assert queue.take_error(late) is late
    sent(queue, b"a")
    queue.answered(answer(1, 3), delay=0)
    error = queue.take_error(late)
    assert isinstance(error, PushRefusedError)
    assert error.__notes__ == ["and: late"]
    assert queue.take_error() is None


def test_errors_are_taken_once_with_positions_since_the_start() -> None:
    queue, _ = make(linger_seconds=0, max_batch_items=2)
    sent(queue, b"a", num_items=2)
    queue.answered(answer(1, 1, 1), delay=0)
    sent(queue, b"b", num_items=2)
    queue.answered(answer(2, 1, 3), delay=0)
    error = queue.take_error()
    assert isinstance(error, PushRefusedError)
    assert [outcome.index for outcome in error.result.refused] == [3]
    assert queue.take_error() is None


def test_failed_requests_and_refusals_come_together() -> None:
    queue, _ = make(linger_seconds=0, max_batch_items=2)
    sent(queue, b"a", b"b", num_items=2)
    queue.answered(answer(1, 3, 1), delay=0)
    queue.answered(failure(2, 3, 0), delay=0)
    error = queue.take_error()
    assert isinstance(error, InvalidRequestError)
    assert "1 items refused" in error.__notes__[0]
    counts = queue.counts()
    assert (counts.num_failed, counts.num_refused, counts.num_stored) == (2, 1, 1)


def test_missing_outcomes_are_a_bug_of_the_servers_not_a_hang() -> None:
    queue, _ = make(linger_seconds=0)
    queue.add(b"a", 2)
    mark = queue.hurry()
    queue.next_request()
    queue.answered(answer(1, 1), delay=0)
    assert queue.is_settled(mark)
    assert isinstance(queue.take_error(), InternalServerError)


def test_refusals_can_be_counted_only() -> None:
    queue, _ = make(linger_seconds=0, raise_on_refused=False)
    sent(queue, b"a")
    queue.answered(answer(1, 3), delay=0)
    assert queue.take_error() is None
    assert queue.counts().num_refused == 1
