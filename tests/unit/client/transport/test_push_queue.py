from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import EID, Experience, trxp
from experience_buffer._transport.push_queue import PushQueue, Request
from experience_buffer.errors import (
    InternalServerError,
    InvalidRequestError,
    PushRefusedError,
    ResourceExhaustedError,
    UnavailableError,
)
from experience_buffer.options import WriterOptions
from experience_buffer.outcomes import PushOutcome
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
    assert queue.answered(failure(1, 14, 2.5), delay=0) == (), "it is sent again"
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


def test_the_oldest_that_waits_for_room_is_halved_until_there_is_enough_for_a_part() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=5)
    for payload in (b"a", b"b", b"c", b"d", b"e", b"f", b"g"):
        queue.add(payload, 1)
    batches = []
    for room in (0, 2, 4, 9, 9, 9):
        while (request := queue.next_request()) is not None:
            push = parsed(request)
            payloads = [push.push.payload, *push.push.payloads]
            if len(payloads) > room:
                queue.answered(failure(push.sequence, 8, 1), delay=0)
            else:
                batches.append(b"".join(payloads))
                room -= len(payloads)
                queue.answered(answer(push.sequence, *[1] * len(payloads)), delay=0)
        clock.now += 1
    assert b"".join(batches) == b"abcdefg"
    assert len(batches[0]) < 5
    assert queue.counts().num_pending == 0
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
    assert "1 item refused" in error.__notes__[0]
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


def encoded(run: int, **fields: Any) -> bytes:
    eid = EID(1, 2, run, 0, "s")
    return trxp.encode([Experience(eid=eid, tokens=[1, 2], prompt_length=1, **fields)])


def stored_by(queue: PushQueue, clock: Clock, most: int, *, bad: int = -1) -> list[int]:
    """Answer all requests as a server that takes no more than so many at once; the sizes of all."""
    sizes: list[int] = []
    while True:
        request = queue.next_request()
        if request is None:
            if not queue.pending_bytes:
                return sizes
            clock.now += 1
            continue
        runs = [each.eid.run for payload in request.payloads for each in trxp.decode(payload)]
        assert runs == list(request.positions)
        sizes.append(len(runs))
        if len(runs) > most or bad in runs:
            queue.answered(failure(request.sequence, 8, 0), delay=0)
        else:
            queue.answered(answer(request.sequence, *[1] * len(runs)), delay=0)


@pytest.mark.parametrize("together", [1, 3, 40])
def test_what_is_too_much_at_once_is_sent_in_halves_until_it_goes(together: int) -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=40)
    runs = range(80)
    for start in range(0, 80, together):
        part = runs[start : start + together]
        queue.add(trxp.merge([encoded(run) for run in part]), len(part))
    mark = queue.hurry()
    sizes = stored_by(queue, clock, 7)
    assert (queue.num_stored, queue.num_failed, queue.pending_bytes) == (80, 0, 0)
    assert queue.is_settled(mark)
    assert queue.take_error() is None
    assert max(sizes) > 7
    assert sum(size <= 7 for size in sizes) <= 80 / 3


def test_requests_stay_small_for_a_while() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=8)
    for run in range(8):
        queue.add(encoded(run), 1)
    stored_by(queue, clock, 4)
    assert queue.most_items == 4
    assert not queue.add(encoded(8), 1) or queue.next_request() is not None
    clock.now += 31
    assert queue.most_items == 8


def test_one_that_can_never_go_is_refused_by_name_and_its_neighbours_go_in() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=40)
    for run in range(9):
        queue.add(encoded(run), 1)
    stored_by(queue, clock, 100, bad=5)
    assert (queue.num_stored, queue.num_refused, queue.num_failed) == (8, 1, 0)
    error = queue.take_error()
    assert isinstance(error, PushRefusedError)
    [outcome] = error.result.refused
    assert (outcome.index, outcome.uid, outcome.message) == (5, "1/2/5/0/s", "text")


def test_parts_that_wait_go_again_in_the_order_of_the_first_time() -> None:
    queue, clock = make(linger_seconds=0, max_batch_items=4)
    for run in range(8):
        queue.add(encoded(run), 1)
    first, second = queue.next_request(), queue.next_request()
    assert first is not None
    assert second is not None
    queue.answered(failure(second.sequence, 8, 1), delay=0)
    queue.answered(failure(first.sequence, 8, 0), delay=0)
    queue.rewind()
    clock.now += 1
    order = [queue.next_request() for _ in range(3)]
    assert [each.positions for each in order if each] == [range(2), range(2, 4), range(4, 8)]
    assert queue.next_request() is None


def test_payloads_leave_their_place_when_they_are_taken_apart() -> None:
    queue, _ = make(linger_seconds=0)
    pair, single = trxp.merge([encoded(0), encoded(1)]), encoded(2)
    queue.add(pair, 2)
    queue.add(single, 1)
    assert queue.next_request() is not None
    assert queue.answered(failure(1, 8, 0), delay=0) == [pair, single]
    assert queue.next_request() is not None
    assert queue.answered(failure(2, 8, 0), delay=0) == (), "both are single now"


def test_a_stream_that_ends_by_its_largest_request_goes_on_without_it() -> None:
    queue, _ = make(linger_seconds=0, max_batch_items=1)
    large = encoded(1, response_text="x" * 500)
    sent(queue, encoded(0), large, encoded(2))
    limit = ResourceExhaustedError("a message of 900 bytes is over the limit")
    assert queue.broke(UnavailableError("gone")) is None
    assert queue.broke(limit) == [large]
    assert (queue.num_refused, queue.counts().num_pending) == (1, 2)
    for _ in range(2):
        assert queue.broke(limit) is not None
    assert queue.broke(limit) is None, "nothing is under way"


def test_what_cannot_be_taken_apart_has_failed() -> None:
    queue, _ = make(linger_seconds=0)
    [request] = sent(queue, b"damaged", num_items=2)
    assert request is not None
    assert queue.answered(failure(1, 8, 0), delay=0) == [b"damaged"]
    assert queue.counts().num_failed == 2
    assert isinstance(queue.take_error(), ResourceExhaustedError)


def test_what_cannot_be_written_counts_at_its_place() -> None:
    queue, _ = make(linger_seconds=0)
    queue.add(encoded(0), 1)
    outcome = PushOutcome(index=0, uid="u", status="refused", reason="invalid", message="why")
    queue.refuse(outcome)
    queue.add(encoded(2), 1)
    assert [queue.next_request().positions for _ in range(2)] == [range(1), range(2, 3)]  # type: ignore[union-attr]
    error = queue.take_error()
    assert isinstance(error, PushRefusedError)
    assert [each.index for each in error.result.refused] == [1]
