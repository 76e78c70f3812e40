"""A push that is too much at once goes in smaller requests, down to one item, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer import EID, ClientOptions, Experience, Tombstone, trxp
from experience_buffer._messages.push_plan import Push
from experience_buffer.errors import (
    BufferFullError,
    ExperienceBufferError,
    InvalidRequestError,
    ResourceExhaustedError,
    TrxpError,
    UnavailableError,
)
from experience_buffer.outcomes import PushResult
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1 import types_pb2

TOO_MUCH = BufferFullError("0 + 120 exceed max_items = 20; split the push")


def rollout(run: int, **fields: Any) -> Experience:
    return Experience(eid=EID(1, 2, run, 0, "s"), tokens=[1, 2], prompt_length=1, **fields)


def uids_of(request: pb.PushRequest) -> list[str]:
    payloads = [each for each in (request.payload, *request.payloads) if each]
    found = [each.eid.uid for one in payloads for each in trxp.decode(one)]
    return found + [f"dead/{each.id.run}" for each in request.tombstones]


def run(push: Push, most: int, *, is_bad: Callable[[str], bool] = lambda uid: False) -> list[int]:
    """Make its calls of a server that takes no more than so many items; the sizes of all calls."""
    sizes = []
    while (call := push.next_call()) is not None:
        assert isinstance(call.request, bytes)
        uids = uids_of(pb.PushRequest.FromString(call.request))
        sizes.append(len(uids))
        if len(uids) > most or any(map(is_bad, uids)):
            push.failed(TOO_MUCH)
            continue
        answer = pb.PushResponse(policy_version=17)
        for index, uid in enumerate(uids):
            stored = types_pb2.PUSH_STATUS_STORED
            answer.outcomes.add(index=index, uid=uid, status=stored)
        push.answered(call.parse(answer))
    return sizes


def expected(num_experiences: int, num_tombstones: int) -> list[str]:
    runs = range(num_tombstones)
    return [rollout(each).eid.uid for each in range(num_experiences)] + [f"dead/{n}" for n in runs]


def made(
    num_experiences: int, num_tombstones: int = 0, *, is_raw: bool = False, **options: Any
) -> Push:
    rollouts = [rollout(each) for each in range(num_experiences)]
    return Push(
        trxp.encode(rollouts) if is_raw else rollouts,
        [Tombstone(EID("dead", "t", each)) for each in range(num_tombstones)],
        ClientOptions(**options),
        buffer="math",
        group_size=0,
    )


@given(
    num_experiences=st.integers(1, 40),
    num_tombstones=st.integers(0, 20),
    most=st.integers(1, 50),
    max_push_items=st.integers(1, 50),
    is_raw=st.booleans(),
)
def test_all_goes_in_whatever_the_limit(
    num_experiences: int, num_tombstones: int, most: int, max_push_items: int, is_raw: bool
) -> None:
    push = made(num_experiences, num_tombstones, is_raw=is_raw, max_push_items=max_push_items)
    run(push, most)
    result = push.result()
    assert [each.uid for each in result.outcomes] == expected(num_experiences, num_tombstones)
    assert [each.index for each in result.outcomes] == list(range(num_experiences + num_tombstones))
    assert result.refused == ()
    assert result.policy_version == 17


def test_what_comes_after_is_as_small_as_what_has_gone() -> None:
    sizes = run(made(120, max_push_items=60), 20)
    assert sizes == [60, 30, 15, 15, 30, 15, 15, 15, 15, 15, 15]


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("bad", [{0}, {4}, {6}, {2, 3}, set(range(7))])
def test_an_item_that_can_never_go_is_named_and_its_neighbours_go_in(
    bad: set[int], is_raw: bool
) -> None:
    push = made(7, is_raw=is_raw)
    run(push, 100, is_bad=lambda uid: int(uid.split("/")[2]) in bad)
    result = push.result()
    assert [each.uid for each in result.outcomes] == expected(7, 0)
    assert {each.index for each in result.refused} == bad
    assert {each.message for each in result.refused} == {str(TOO_MUCH)}
    assert {each.reason for each in result.refused} == {"invalid"}


def test_a_tombstone_that_can_never_go_is_named() -> None:
    push = made(2, 3)
    run(push, 100, is_bad=lambda uid: uid == "dead/1")
    [refused] = push.result().refused
    assert (refused.index, refused.uid.startswith("dead/t/1/0/")) == (3, True)
    assert push.result().num_stored == 4


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("gone"),
        BufferFullError("full", retry_delay_seconds=1.0),
        InvalidRequestError("group_size is over the limit", subject="group_size"),
    ],
)
def test_what_less_at_once_does_not_help_is_raised(error: ExperienceBufferError) -> None:
    push = made(3)
    push.next_call()
    with pytest.raises(type(error)) as caught:
        push.failed(error)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("server.max_push_items is 2; split the push", subject="payload"),
        TrxpError("metadata: over max_metadata_nodes"),
        ResourceExhaustedError("a message of 9 bytes is over the limit"),
    ],
)
def test_limits_of_the_server_are_met_by_less_at_once(error: ExperienceBufferError) -> None:
    push = made(3)
    assert push.next_call() is not None
    push.failed(error)
    assert run(push, 100) == [2, 1]


def test_a_raw_payload_over_the_message_limit_is_taken_apart() -> None:
    rollouts = [rollout(each, response_text="x" * 20_000) for each in range(9)]
    options = ClientOptions(max_message_bytes=64 * 1024)
    push = Push(trxp.encode(rollouts), (), options, buffer="math", group_size=0)
    assert max(run(push, 100)) > 1
    assert [each.uid for each in push.result().outcomes] == expected(9, 0)


def test_a_damaged_payload_is_what_the_server_says_of_it() -> None:
    push = Push(b"damaged", (), ClientOptions(), buffer="math", group_size=0)
    push.next_call()
    error = TrxpError("frame: the lengths lie")
    with pytest.raises(TrxpError) as caught:
        push.failed(error)
    assert caught.value is error


def test_nothing_to_push_calls_nobody() -> None:
    push = made(0)
    assert push.next_call() is None
    assert push.result() == PushResult(outcomes=(), policy_version=None)
