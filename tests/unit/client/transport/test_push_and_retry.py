from __future__ import annotations

import heapq
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer import trxp
from experience_buffer._messages import push_split
from experience_buffer._messages.push_plan import Push
from experience_buffer._transport.retry import Attempts
from experience_buffer.errors import (
    BufferFullError,
    DeadlineExceededError,
    ExperienceBufferError,
    InvalidRequestError,
    MessageTooLargeError,
    ResourceExhaustedError,
    TrxpError,
    UnavailableError,
)
from experience_buffer.experience import EID, Experience
from experience_buffer.options import ClientOptions, RetryOptions
from experience_buffer.outcomes import PushOutcome

LIMIT = 64 * 1024 - push_split.ENVELOPE_BYTES


def encode_sizes(sizes: Sequence[Any]) -> list[bytes | memoryview]:
    """Stands for a codec: an "experience" is its size, the payload a piece of each."""
    return [bytes(size) for size in sizes]


def payloads(found: Iterable[Any]) -> list[tuple[int, int, Any]]:
    """All of them; no experience is refused."""
    pieces = list(found)
    assert not any(isinstance(each, PushOutcome) for each in pieces)
    return pieces


@given(
    sizes=st.lists(st.integers(1, LIMIT), max_size=40),
    max_push_items=st.integers(1, 11),
    max_push_bytes=st.integers(1, LIMIT),
)
def test_pieces_cover_everything_in_order_below_the_limits(
    sizes: list[Any], max_push_items: int, max_push_bytes: int
) -> None:
    options = ClientOptions(
        max_message_bytes=64 * 1024, max_push_items=max_push_items, max_push_bytes=max_push_bytes
    )
    pieces = payloads(push_split.encode_pieces(sizes, options, encode=encode_sizes))
    covered = [index for start, end, _ in pieces for index in range(start, end)]
    assert covered == list(range(len(sizes)))
    for start, end, payload in pieces:
        num_bytes = len(b"".join(payload))
        assert num_bytes == sum(sizes[start:end]) <= LIMIT
        assert end - start <= max_push_items
        assert num_bytes <= 2 * max_push_bytes or end - start == 1


def test_encoding_is_lazy_and_rarely_repeated() -> None:
    encoded: list[int] = []

    def encode(sizes: Sequence[Any]) -> list[bytes | memoryview]:
        encoded.append(len(sizes))
        return encode_sizes(sizes)

    many: list[Any] = [1000] * 1000
    options = ClientOptions(max_push_items=512, max_push_bytes=100_000)
    pieces = push_split.encode_pieces(many, options, encode=encode)
    next(pieces)
    assert len(encoded) <= 3
    assert len(list(pieces)) >= 8
    assert sum(encoded) <= 2000


def test_one_over_the_limit_is_named_and_the_ones_before_are_not_lost() -> None:
    options = ClientOptions(max_message_bytes=64 * 1024, max_push_items=100)
    sizes: list[Any] = [10, 20, LIMIT + 1, 30]
    pieces = push_split.encode_pieces(sizes, options, encode=encode_sizes)
    found = list(pieces)
    assert [each[:2] for each in found if not isinstance(each, PushOutcome)] == [(0, 2), (3, 4)]
    [large] = (each for each in found if isinstance(each, PushOutcome))
    assert (large.index, large.status, large.reason) == (2, "refused", "invalid")
    assert re.match(f"experience 2 takes {LIMIT + 1} .*{LIMIT}.*max_message_bytes", large.message)


def test_raw_payload_over_the_limit_is_refused() -> None:
    options = ClientOptions(max_message_bytes=64 * 1024)
    push = Push(b"x" * (LIMIT + 1), (), options, buffer="math", group_size=0)
    with pytest.raises(MessageTooLargeError, match="the payload takes"):
        push.next_call()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(
    timeout: float = 1000.0, *, jitter: Callable[[], float] = lambda: 0.0, **options: Any
) -> tuple[Attempts, Clock]:
    clock = Clock()
    return Attempts(RetryOptions(**options), timeout, clock=clock, jitter=jitter), clock


def test_backoff_doubles_up_to_its_limit() -> None:
    tries, _ = attempts(initial_backoff_seconds=0.1, max_backoff_seconds=1.0)
    delays = [tries.delay_after(UnavailableError("x"), idempotent=True) for _ in range(6)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(("asked", "is_tried"), [(9.97, True), (9.99, False), (10.0, False)])
def test_no_attempt_begins_that_can_only_run_out_of_time(asked: float, is_tried: bool) -> None:
    """What it would end with says less than what the one before has said."""
    tries, _ = attempts(timeout=10.0, jitter=lambda: 0.0)
    full = ResourceExhaustedError("full", retry_delay_seconds=asked)
    if is_tried:
        assert tries.delay_after(full, idempotent=False) == asked
    else:
        with pytest.raises(ResourceExhaustedError, match="full"):
            tries.delay_after(full, idempotent=False)


def test_jitter_takes_up_to_half_away_but_never_below_what_the_server_asks() -> None:
    tries, _ = attempts(initial_backoff_seconds=2.0, jitter=lambda: 1.0)
    assert tries.delay_after(UnavailableError("x"), idempotent=True) == pytest.approx(1.0)
    error = UnavailableError("stopping", retry_delay_seconds=7.0)
    assert tries.delay_after(error, idempotent=True) == pytest.approx(7.0)


def test_a_full_server_is_asked_again_after_its_own_delay_however_often_it_refuses() -> None:
    jitters = itertools.cycle((0.0, 0.5, 1.0))
    tries, _ = attempts(initial_backoff_seconds=3.0, jitter=lambda: next(jitters))
    full = ResourceExhaustedError("full", retry_delay_seconds=0.1)
    delays = [tries.delay_after(full, idempotent=False) for _ in range(300)]
    assert delays == pytest.approx([0.1, 0.15, 0.2] * 100)
    # Refusals don't count when it can't be reached after all, and the other way round.
    assert tries.delay_after(UnavailableError("x"), idempotent=True) == pytest.approx(3.0)
    tries.delay_after(UnavailableError("x"), idempotent=True)
    assert tries.delay_after(full, idempotent=False) <= 0.2


def test_of_many_who_push_at_once_none_is_left_out() -> None:
    """One place, 40 clients that come again at once when they have had it: the greedy don't win."""
    rng = random.Random(5)
    clock = Clock()
    served: Counter[int] = Counter()
    tries: dict[int, Attempts] = {}
    events = sorted((100.0 + rng.random() / 2, client) for client in range(40))
    free_time = 0.0
    while events[0][0] < 130.0:
        clock.now, client = heapq.heappop(events)
        if clock.now < free_time:
            of_client = tries.setdefault(
                client, Attempts(RetryOptions(), 30.0, clock=clock, jitter=rng.random)
            )
            full = ResourceExhaustedError("full", retry_delay_seconds=0.1)
            delay = of_client.delay_after(full, idempotent=False)
        else:
            served[client] += 1
            tries.pop(client, None)
            free_time = clock.now + 0.05
            delay = 0.05 + rng.random() / 100
        heapq.heappush(events, (clock.now + delay, client))
    assert len(served) == 40


def test_ten_thousand_failures_do_not_overflow() -> None:
    tries, _ = attempts(multiplier=10.0)
    for _ in range(10_000):
        assert tries.delay_after(UnavailableError("x"), idempotent=True) <= 5.0


@pytest.mark.parametrize(
    ("error", "idempotent", "retried"),
    [
        (UnavailableError("x"), True, True),
        (UnavailableError("x"), False, False),
        (UnavailableError("x", retry_delay_seconds=0.5), False, True),
        (BufferFullError("x"), True, False),
        (BufferFullError("x", retry_delay_seconds=0.5), False, True),
        (InvalidRequestError("x", retry_delay_seconds=0.5), True, False),
        (DeadlineExceededError("x"), True, False),
    ],
)
def test_what_is_retried(error: ExperienceBufferError, idempotent: bool, retried: bool) -> None:
    tries, _ = attempts()
    if retried:
        assert tries.delay_after(error, idempotent=idempotent) > 0
    else:
        with pytest.raises(type(error)) as caught:
            tries.delay_after(error, idempotent=idempotent)
        assert caught.value is error


def test_no_attempt_after_the_deadline() -> None:
    tries, clock = attempts(timeout=10.0, initial_backoff_seconds=3.0, max_backoff_seconds=3.0)
    assert tries.delay_after(UnavailableError("x"), idempotent=True) == 3.0
    clock.now += 7.5
    assert tries.remaining() == pytest.approx(2.5)
    with pytest.raises(UnavailableError) as caught:
        tries.delay_after(UnavailableError("x"), idempotent=True)
    assert caught.value.__notes__ == ["gave up after 2 attempts in 7.5 s"]
    clock.now += 100
    assert tries.remaining() > 0


def test_attempts_can_be_bounded() -> None:
    tries, _ = attempts(max_attempts=2)
    tries.delay_after(UnavailableError("x"), idempotent=True)
    with pytest.raises(UnavailableError):
        tries.delay_after(UnavailableError("x"), idempotent=True)


def test_deadline_after_failures_tells_of_them() -> None:
    tries, _ = attempts()
    tries.delay_after(UnavailableError("refused"), idempotent=True)
    with pytest.raises(DeadlineExceededError) as caught:
        tries.delay_after(DeadlineExceededError("late"), idempotent=True)
    assert caught.value.__notes__ == ["the attempt before failed with: refused"]


def test_what_is_refused_together_is_rarely_tried_again() -> None:
    tried: list[int] = []

    def encode(many: Sequence[Any]) -> list[bytes | memoryview]:
        tried.append(len(many))
        if len(many) > 5:
            raise TrxpError("too many values")
        return [bytes(one) for one in many]

    many: list[Any] = [7] * 100
    options = ClientOptions(max_push_items=40)
    pieces = payloads(push_split.encode_pieces(many, options, encode=encode))
    assert [end - start for start, end, _ in pieces] == [5] * 20
    assert [size for size in tried if size > 5] == [40, 20, 10]


def test_what_is_too_much_for_one_payload_is_pushed_in_parts() -> None:
    many = [Experience(tokens=[1, 2], prompt_length=1, info={"a": []}) for _ in range(3)]
    for one in many:
        one.info["a"] += [[] for _ in range(200_000)]
    pieces = payloads(push_split.encode_pieces(many, ClientOptions()))
    assert [(start, end) for start, end, _ in pieces] == [(0, 2), (2, 3)]
    for start, end, payload in pieces:
        assert [one.info for one in trxp.decode(b"".join(payload))] == [
            one.info for one in many[start:end]
        ]
    many[1].info["a"] *= 3
    found = list(push_split.encode_pieces(many, ClientOptions()))
    [refused] = (each for each in found if isinstance(each, PushOutcome))
    assert re.match(r"items\[1\]: .*max_metadata_nodes", refused.message)
    assert [each[:2] for each in found if not isinstance(each, PushOutcome)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("max_push_items", [1, 2, 100])
@pytest.mark.parametrize("bad", [{0}, {5}, {2, 3}, {0, 1, 4, 5}, set(range(6))])
def test_what_cannot_be_written_is_refused_at_its_place_and_its_neighbours_go(
    max_push_items: int, bad: set[int]
) -> None:
    many = [
        Experience(eid=EID(1, 2, run, 0, "s"), tokens=[1, 2], prompt_length=1) for run in range(6)
    ]
    for place in bad:
        many[place].info["when"] = object()
    found = list(push_split.encode_pieces(many, ClientOptions(max_push_items=max_push_items)))
    refused = {each.index: each for each in found if isinstance(each, PushOutcome)}
    assert refused.keys() == bad
    for place, outcome in refused.items():
        assert outcome.message.startswith(f"items[{place}].info")
        assert outcome.uid == many[place].eid.uid
    written = [
        experience.eid.run
        for each in found
        if not isinstance(each, PushOutcome)
        for experience in trxp.decode(b"".join(each[2]))
    ]
    assert written == sorted(set(range(6)) - bad)
    places = [each.index if isinstance(each, PushOutcome) else each[0] for each in found]
    assert places == sorted(places)


def test_many_that_cannot_be_written_cost_little_each() -> None:
    tried: list[int] = []

    def encode(many: Sequence[Any]) -> list[bytes | memoryview]:
        tried.append(len(many))
        error = TrxpError("no")
        error.item = 0
        raise error

    many: list[Any] = [7] * 500
    found = list(push_split.encode_pieces(many, ClientOptions(), encode=encode))
    assert len(found) == 500
    assert sum(tried) < 2_000
