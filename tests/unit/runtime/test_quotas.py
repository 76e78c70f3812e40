"""What one client, one buffer and all together may hold."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer_server.runtime.quotas import Charge, Quotas
from experience_buffer_server.settings.buffer import MEBI
from experience_buffer_server.settings.server import ServerSection


class Counted:
    """What was refused."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def push_refused(self, buffer: str, reason: str) -> None:
        self.reasons.append(f"{buffer} {reason}")

    def call_refused(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def make(counted: Counted, **limits: Any) -> Quotas:
    return Quotas(ServerSection(**limits), counted)


def test_streams_are_bounded_for_each_and_for_all(counted: Counted) -> None:
    quotas = make(counted, max_streams_per_client=3, max_streams=5)
    with ExitStack() as stack:
        for client in "aaabb":
            stack.enter_context(quotas.streams.within(client))
        for client, limit in (("a", "max_streams_per_client is 3"), ("b", "max_streams is 5")):
            with pytest.raises(errors.ResourceExhaustedError, match=limit) as refused:
                stack.enter_context(quotas.streams.within(client))
            assert (refused.value.retry_delay_seconds, refused.value.subject) == (1.0, client)
        assert quotas.streams.held.total == 5
    assert quotas.streams.held.total == 0
    assert not quotas.streams.held.of, "names don't pile up"
    assert counted.reasons == ["max_streams_per_client", "max_streams"]


def test_waiting_samples_are_bounded_for_each(counted: Counted) -> None:
    quotas = make(counted, max_waiting_samples_per_client=2)
    with ExitStack() as stack:
        for client in "aab":
            stack.enter_context(quotas.samples.within(client))
        with pytest.raises(errors.ResourceExhaustedError, match="per_client is 2"):
            stack.enter_context(quotas.samples.within("a"))
    assert not quotas.samples.held.of
    assert counted.reasons == ["max_waiting_samples_per_client"]


def test_zero_is_no_limit(counted: Counted) -> None:
    quotas = make(
        counted, max_streams=0, max_streams_per_client=0, max_waiting_samples_per_client=0
    )
    with ExitStack() as stack:
        for _ in range(9000):
            stack.enter_context(quotas.streams.within("a"))
            stack.enter_context(quotas.samples.within("a"))


async def test_places_are_shared_and_given_back(counted: Counted) -> None:
    quotas = make(counted, max_calls=16)
    ends = asyncio.Event()
    tasks = [asyncio.create_task(ends.wait()) for _ in range(16)]
    for number, client in enumerate("a" * 8 + "b" * 8):
        quotas.calls.take_for(client, tasks[number])
    with pytest.raises(
        errors.ResourceExhaustedError, match=r"client 'a' has 8 calls.+limit .+is 8"
    ):
        quotas.calls.take_for("a", tasks[0])
    with pytest.raises(errors.ResourceExhaustedError, match="there are 16 calls under way"):
        quotas.calls.take_for("c", tasks[0])
    give_back = quotas.asking.take_for("x", tasks[0])
    with pytest.raises(errors.ResourceExhaustedError, match="anonymous_calls is 1"):
        quotas.asking.take_for("x", tasks[0])
    give_back()
    quotas.asking.take_for("y", tasks[0])
    ends.set()
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    for places in (quotas.calls, quotas.asking):
        assert (places.held.total, dict(places.held.of)) == (0, {})


def pending(
    quotas: Quotas, client: str, buffer: str, mebi: int, most: int = 0
) -> AbstractContextManager[Charge]:
    return quotas.pending(client, buffer, mebi * MEBI, max_of_buffer=most * MEBI)


def test_no_client_has_more_than_is_left_for_the_others(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=100 * MEBI)
    with ExitStack() as stack:

        def hold(client: str, buffer: str, mebi: int) -> None:
            stack.enter_context(pending(quotas, client, buffer, mebi))

        for _ in range(5):
            hold("a", "math", 10)
        with pytest.raises(errors.ResourceExhaustedError, match="client 'a' has 52428800") as full:
            hold("a", "code", 1)
        assert full.value.retry_delay_seconds == 0.1
        for _ in range(5):
            hold("b", "math", 5)
        with pytest.raises(errors.ResourceExhaustedError, match="would be left"):
            hold("b", "code", 5)
        hold("c", "more", 20)
        with pytest.raises(errors.ResourceExhaustedError, match=r"the limit server\.max_pending"):
            hold("d", "rest", 6)
    assert counted.reasons == ["code client_share", "code client_share", "rest max_pending_bytes"]
    assert (quotas.pending_by_client.total, dict(quotas.pending_by_buffer.of)) == (0, {})


def test_what_the_experiences_of_a_push_take_counts(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=100 * MEBI)
    with pending(quotas, "a", "math", 20), pending(quotas, "b", "math", 1) as charge:
        charge.takes(40 * MEBI)
        assert quotas.pending_by_client.total == 60 * MEBI
        charge.takes(30 * MEBI)
        assert quotas.pending_by_client.total == 50 * MEBI, "its own don't count against it"
        charge.takes(0)
        assert quotas.pending_by_client.total == 21 * MEBI, "the request is held all the same"
        with pytest.raises(errors.ResourceExhaustedError, match=f"{81 * MEBI} more are too many"):
            charge.takes(81 * MEBI)
    with pending(quotas, "a", "math", 20), pending(quotas, "a", "math", 1) as charge:
        with pytest.raises(errors.ResourceExhaustedError, match="client 'a' has"):
            charge.takes(41 * MEBI)
        assert quotas.pending_by_client.total == 20 * MEBI
    assert counted.reasons == ["math max_pending_bytes", "math client_share"]
    assert (quotas.pending_by_client.total, dict(quotas.pending_by_client.of)) == (0, {})


def waiting(quotas: Quotas, stack: ExitStack, buffer: str, mebi: int, most: int = 0) -> Charge:
    """A push of client "a" that was read, and waits in line."""
    charge = stack.enter_context(pending(quotas, "a", buffer, mebi, most))
    charge.takes(3 * mebi * MEBI)
    charge.waits()
    return charge


def test_a_full_buffer_keeps_nobody_from_another(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=128 * MEBI)
    with ExitStack() as stack:
        charges = [waiting(quotas, stack, "full", 4) for _ in range(8)]
        with pytest.raises(errors.BufferFullError, match="half of server") as refused:
            waiting(quotas, stack, "full", 4)
        assert (refused.value.retry_delay_seconds, refused.value.subject) == (1.0, "full")
        waiting(quotas, stack, "also-full", 16)
        with pytest.raises(errors.BufferFullError):
            waiting(quotas, stack, "third", 20)
        assert (quotas.line_by_buffer.total, quotas.pending_by_client.total) == (48 * MEBI, 0)
        with pending(quotas, "a", "other", 60) as whole:
            whole.takes(64 * MEBI)
            with pending(quotas, "b", "other", 60):
                pass
        charges[0].takes(12 * MEBI)
        assert quotas.line_by_buffer.total == 48 * MEBI, "it keeps its place while it is read again"
        charges[0].waits()
        charges[0].has_waited()
        waiting(quotas, stack, "third", 4)
    assert counted.reasons == ["full line_share", "third line_share"]
    assert (quotas.line_by_buffer.total, dict(quotas.line_by_buffer.of)) == (0, {})


def test_a_buffer_may_bound_its_line(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=128 * MEBI)
    with ExitStack() as stack:
        waiting(quotas, stack, "math", 2, most=4)
        with pytest.raises(errors.BufferFullError, match="max_pending_bytes is 4194304"):
            waiting(quotas, stack, "math", 3, most=4)
    assert counted.reasons == ["math buffer_max_pending_bytes"]


def test_by_default_the_largest_push_goes_on_an_idle_server(counted: Counted) -> None:
    quotas = make(counted)
    limits = ServerSection()
    size = limits.max_message_bytes
    for _ in range(2):
        with quotas.pending("a", "math", size, max_of_buffer=0) as charge:
            charge.takes(limits.payload_limits.max_alone_bytes(size))
            charge.waits()
            charge.takes(limits.payload_limits.max_alone_bytes(size))
            charge.has_waited()
    assert not counted.reasons


def test_fixed_limits_hold_beside_the_share(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=100 * MEBI, max_pending_bytes_per_client=8 * MEBI)
    with pending(quotas, "a", "math", 7):
        with pytest.raises(errors.ResourceExhaustedError, match="per_client is 8388608"):
            pending(quotas, "a", "code", 2).__enter__()
        with pytest.raises(errors.ResourceExhaustedError, match="its limit max_pending_bytes is"):
            pending(quotas, "b", "math", 2, most=8).__enter__()
    assert counted.reasons == [
        "code max_pending_bytes_per_client", "math buffer_max_pending_bytes"
    ]  # fmt: skip


def test_a_single_push_always_goes(counted: Counted) -> None:
    quotas = make(counted, max_pending_bytes=MEBI, max_pending_bytes_per_client=1)
    with pending(quotas, "a", "math", 64, most=1):
        assert quotas.pending_by_client.total == 64 * MEBI
    assert not counted.reasons
