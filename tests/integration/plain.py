"""Short names for plain calls: experiences to push, and requests without this package's client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
import torch
from google.rpc import error_details_pb2, status_pb2

from experience_buffer import EID, Experience, trxp
from experience_buffer.v1 import config_pb2, service_pb2, types_pb2
from tests.integration.server import Stub

NONE = config_pb2.GROUP_BY_NONE
STORED = types_pb2.PUSH_STATUS_STORED
DUPLICATE = types_pb2.PUSH_STATUS_DUPLICATE
REFUSED = types_pb2.PUSH_STATUS_REFUSED
NUM_PROMPT, NUM_RESPONSE = 2, 11


def experience(task: int | str, run: int, **fields: Any) -> Experience:
    """An experience of 13 tokens; `step`, `suffix` and `batch` go into its identity."""
    eid = EID(
        batch=fields.pop("batch", 7),
        task=task,
        run=run,
        step=fields.pop("step", 0),
        suffix=fields.pop("suffix", "c0ffee"),
    )
    generator = torch.Generator().manual_seed(1009 * run + 17)
    given: dict[str, Any] = {
        "tokens": torch.randint(0, 50_021, (NUM_PROMPT + NUM_RESPONSE,), generator=generator),
        "logprobs": -torch.rand(NUM_RESPONSE, generator=generator),
        "prompt_length": NUM_PROMPT,
        "reward": run / 3.0,
    }
    return Experience(eid=eid, **(given | fields))


def group(task: int | str, size: int, **fields: Any) -> list[Experience]:
    """The runs of one task."""
    return [experience(task, run, **fields) for run in range(size)]


def groups(count: int, size: int) -> list[Experience]:
    """The groups of so many tasks, one after the other."""
    return [one for task in range(count) for one in group(task, size)]


def uid(task: int | str, run: int) -> str:
    """The uid of an experience of `group`."""
    return experience(task, run).eid.uid


def create(stub: Stub, name: str, **config: Any) -> None:
    """Create a buffer. `consumers` maps names to units; `estimator` and `parameters` are short."""
    consumers = config.pop("consumers", {"trainer": "item"})
    message = config_pb2.BufferConfig(
        name=name,
        consumers=[
            config_pb2.ConsumerConfig(
                name=consumer,
                unit=config_pb2.UNIT_GROUP if unit == "group" else config_pb2.UNIT_ITEM,
            )
            for consumer, unit in consumers.items()
        ],
    )
    if "estimator" in config:
        message.advantage.estimator = config.pop("estimator")
        message.advantage.parameters.update(config.pop("parameters", {}))
    for key, value in config.items():
        setattr(message, key, value)
    stub.CreateBuffer(service_pb2.CreateBufferRequest(config=message))


def push_request(
    name: str,
    experiences: Sequence[Experience] | bytes = (),
    *,
    tombstones: Sequence[tuple[EID, str]] = (),
    group_size: int = 0,
) -> service_pb2.PushRequest:
    """A push of experiences, or of a payload as it is."""
    payload = experiences if isinstance(experiences, bytes) else trxp.encode(experiences)
    request = service_pb2.PushRequest(buffer=name, payload=payload, group_size=group_size)
    for eid, reason in tombstones:
        tombstone = request.tombstones.add(reason=reason)
        tombstone.id.batch, tombstone.id.task = str(eid.batch), str(eid.task)
        tombstone.id.run, tombstone.id.step, tombstone.id.suffix = eid.run, eid.step, eid.suffix
    return request


def push(
    stub: Stub,
    name: str,
    experiences: Sequence[Experience] | bytes = (),
    **rest: Any,
) -> list[types_pb2.PushOutcome]:
    """Push and return the outcomes."""
    return list(stub.Push(push_request(name, experiences, **rest)).outcomes)


def statuses(outcomes: Sequence[types_pb2.PushOutcome]) -> list[int]:
    """The statuses of outcomes, which also have to be in order."""
    assert [outcome.index for outcome in outcomes] == list(range(len(outcomes)))
    return [outcome.status for outcome in outcomes]


def sample(stub: Stub, name: str, batch_size: int, **rest: Any) -> service_pb2.SampleResponse:
    """Sample as "trainer", waiting up to 40 s unless told otherwise."""
    fields: dict[str, Any] = {"consumer": "trainer", "timeout_seconds": 40.0} | rest
    return stub.Sample(service_pb2.SampleRequest(buffer=name, batch_size=batch_size, **fields))


def uids(response: Any) -> list[str]:
    """The uids of what a response, frame or page holds."""
    return [one.uid for one in response.experiences]


def decode(response: service_pb2.SampleResponse) -> list[Experience]:
    """The experiences of a response."""
    return [trxp.decode(one.payload)[0] for one in response.experiences]


def ack(stub: Stub, name: str, response: service_pb2.SampleResponse) -> int:
    """Acknowledge a sampled batch; how many experiences were consumed."""
    request = service_pb2.AckRequest(buffer=name, lease_id=response.lease.id)
    return stub.Ack(request).num_experiences


def stats(stub: Stub, name: str) -> service_pb2.BufferStats:
    """A buffer's statistics."""
    return stub.GetStats(service_pb2.GetStatsRequest(buffer=name)).buffers[0]


def summaries(stub: Stub, name: str) -> list[types_pb2.ExperienceSummary]:
    """All summaries, page by page."""
    found: list[types_pb2.ExperienceSummary] = []
    request = service_pb2.ListRequest(buffer=name, page_size=997)
    while True:
        page = stub.List(request)
        found += page.experiences
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def states(stub: Stub, name: str) -> list[str]:
    """The state of every experience, oldest first, in words."""
    prefix = "EXPERIENCE_STATE_"
    return [
        types_pb2.ExperienceState.Name(one.state).removeprefix(prefix).lower()
        for one in summaries(stub, name)
    ]


def error_of(call: Callable[[], object]) -> tuple[str, str, dict[str, Any]]:
    """The code, the text and the details of a failed call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    details = {}
    trailer: Any = caught.value.trailing_metadata() or ()
    for key, value in trailer:
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                name = packed.TypeName().rpartition(".")[2]
                details[name] = getattr(error_details_pb2, name)()
                packed.Unpack(details[name])
    return caught.value.code().name, caught.value.details() or "", details
