"""The soak's operator: looks, changes settings back and forth, makes and deletes, and gives up.

What it does is a table: a new call is one more line.
"""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc

from experience_buffer import BufferConfig, Client, ExperienceNotFoundError, Selector
from experience_buffer.v1 import service_pb2
from experience_buffer.v1.service_pb2_grpc import ExperienceBufferStub
from tests.journal import Journal
from tests.soak.plan import IDLE, QUEUE, REPLAY, REPLAY_ITEMS, Plan, paced, replay_consumer
from tests.soak.workers import members

_TICKS_PER_SECOND: Final = 10.0
_SELECTORS: Final = (
    Selector("prioritized", exponent=0.6),
    Selector("uniform"),
    Selector("max", key="reward"),
    Selector("lifo"),
)


class Operator:
    """What the chores work with."""

    def __init__(self, plan: Plan, client: Client, stub: ExperienceBufferStub) -> None:
        self.plan = plan
        self.client = client
        self.stub = stub
        self._counts: Counter[str] = Counter()

    def turn(self, what: str) -> int:
        """How often something was done before."""
        self._counts[what] += 1
        return self._counts[what] - 1


def look(operator: Operator) -> None:
    """Read statistics, buffers, a page of summaries and one of its experiences."""
    operator.client.get_stats()
    operator.client.list_buffers()
    found = next(operator.client.list(buffer=REPLAY, page_size=50), None)
    if found is not None:
        with contextlib.suppress(ExperienceNotFoundError):  # It may have been evicted since.
            operator.client.get(found.uid, buffer=REPLAY)


def scrape(operator: Operator) -> None:
    with urllib.request.urlopen(operator.plan.metrics_url, timeout=10) as answer:
        answer.read()


def change_limits(operator: Operator) -> None:
    """Let a buffer hold less for a while."""
    fewer = operator.turn("limits") % 2
    operator.client.update_buffer(REPLAY, max_items=REPLAY_ITEMS - 40 * fewer)


def change_selectors(operator: Operator) -> None:
    selector = _SELECTORS[operator.turn("selectors") % len(_SELECTORS)]
    operator.client.update_buffer(REPLAY, consumers=(replay_consumer(selector),))


def change_leases(operator: Operator) -> None:
    """Give consumers more or less time."""
    operator.client.update_buffer(QUEUE, lease_seconds=30.0 + 30.0 * (operator.turn("leases") % 2))


def make_and_delete(operator: Operator) -> None:
    """Create a buffer that had no like before, fill it a little, and delete it."""
    name = f"scratch-{operator.turn('scratch')}"
    operator.client.create_buffer(BufferConfig(name, group_by="none"))
    operator.client.push(members("S", name, 0, range(3)), buffer=name)
    operator.client.sample(1, buffer=name, timeout=5.0)
    operator.client.delete_buffer(name, force=True)


def cancel(operator: Operator) -> None:
    """Give up calls that wait, streams that deliver, and streams that push."""
    stub = operator.stub
    waiting: dict[str, Any] = {"buffer": IDLE, "consumer": "trainer", "batch_size": 1}
    call = stub.Sample.future(service_pb2.SampleRequest(timeout_seconds=60.0, **waiting))
    stub.GetBuffer(service_pb2.GetBufferRequest(name=IDLE))
    call.cancel()
    held: dict[str, Any] = {"buffer": REPLAY, "consumer": "learner", "batch_size": 4}
    opening = service_pb2.SampleStreamOpen(lease_seconds=2.0, **held)
    requests = [
        service_pb2.SampleStreamRequest(open=opening),
        service_pb2.SampleStreamRequest(credits=2),
    ]
    stream = stub.SampleStream(iter(requests))
    next(stream, None)
    stream.cancel()
    request = service_pb2.PushRequest(buffer=IDLE, payload=b"TRXP, but no more")
    pushes = stub.PushStream(iter([service_pb2.PushStreamRequest(sequence=1, push=request)]))
    pushes.cancel()


def take_snapshot(operator: Operator) -> None:
    """Copy the store while all of this goes on."""
    operator.client.snapshot()


@dataclass(frozen=True, slots=True)
class Chore:
    name: str
    every_seconds: float
    do: Callable[[Operator], None]


CHORES: Final = (
    Chore("look", 1.0, look),
    Chore("scrape", 2.0, scrape),
    Chore("cancel", 0.5, cancel),
    Chore("make and delete", 2.0, make_and_delete),
    Chore("change limits", 7.0, change_limits),
    Chore("change selectors", 5.0, change_selectors),
    Chore("change leases", 9.0, change_leases),
    Chore("snapshot", 15.0, take_snapshot),
)


def operate(plan: Plan, role: str) -> None:
    """Do all chores, each at its time, until the workers stop."""
    journal = plan.journal(role)
    with ExitStack() as stack:
        client = stack.enter_context(plan.client())
        channel = stack.enter_context(grpc.insecure_channel(plan.address))
        operator = Operator(plan, client, ExperienceBufferStub(channel))
        due = dict.fromkeys(CHORES, 0.0)
        for now in paced(_TICKS_PER_SECOND):
            if not plan.is_pushing:
                break
            for chore in CHORES:
                if now >= due[chore]:
                    due[chore] = now + chore.every_seconds
                    _do(chore, operator, journal)


def _do(chore: Chore, operator: Operator, journal: Journal) -> None:
    began = time.monotonic()
    chore.do(operator)
    journal.write("did", chore=chore.name, seconds=time.monotonic() - began)
