"""Queries and buffers over plain gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import (
    BufferConfig,
    Client,
    ConsumerConfig,
    InvalidRequestError,
    Pacing,
    Selector,
    trxp,
)
from experience_buffer.v1 import config_pb2, service_pb2
from tests.integration.plain import (
    STORED,
    create,
    error_of,
    experience,
    group,
    push,
    sample,
    states,
    stats,
    statuses,
    summaries,
    uids,
)
from tests.integration.server import Stub, eventually

SERVICE = "experience_buffer.v1.ExperienceBuffer"


# --- queries


def test_get_list_and_delete(stub: Stub, name: str) -> None:
    create(stub, name, group_size=7)
    pushed = [*group(0, 3), *group(1, 2), experience(1, 2, step=1)]
    push(stub, name, pushed)
    found = stub.Get(service_pb2.GetRequest(buffer=name, uid=pushed[4].eid.uid))
    assert found.payload == trxp.encode([pushed[4]])
    assert found.summary.reward == pytest.approx(1 / 3)
    assert (found.summary.response_tokens, found.summary.tid) == (11, "7/1")
    assert found.summary.payload_bytes == len(found.payload)
    first = stub.List(service_pb2.ListRequest(buffer=name, page_size=4))
    rest = stub.List(
        service_pb2.ListRequest(buffer=name, page_size=4, page_token=first.next_page_token)
    )
    assert uids(first) + uids(rest) == [one.eid.uid for one in pushed]
    assert (len(first.experiences), rest.next_page_token) == (4, "")
    where = service_pb2.Filter(tid="7/1", sid="7/1/0")
    assert uids(stub.List(service_pb2.ListRequest(buffer=name, filter=where))) == [
        one.eid.uid for one in pushed[3:5]
    ]
    held = sample(stub, name, 1)
    gone = [pushed[0].eid.uid, pushed[1].eid.uid, "never pushed"]
    deleted = stub.Delete(service_pb2.DeleteRequest(buffer=name, uids=gone))
    assert (deleted.num_deleted, list(deleted.leased_uids)) == (1, uids(held))
    assert list(deleted.unknown_uids) == ["never pushed"]
    assert stub.Delete(service_pb2.DeleteRequest(buffer=name, filter=where)).num_deleted == 2
    assert [one.uid for one in summaries(stub, name)] == [pushed[i].eid.uid for i in (0, 2, 5)]
    assert statuses(push(stub, name, [pushed[1]])) == [STORED], "what was deleted may come again"


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (service_pb2.GetRequest(uid="7/0/9/0/c0ffee"), "NOT_FOUND", "holds no experience"),
        (service_pb2.ListRequest(page_size=1001), "INVALID_ARGUMENT", "limit of 1000"),
        (service_pb2.ListRequest(page_token="x"), "INVALID_ARGUMENT", "page_token 'x'"),
        (service_pb2.DeleteRequest(), "INVALID_ARGUMENT", "give uids, or a filter, such as tid"),
        (service_pb2.SampleRequest(batch_size=1, consumer="x"), "NOT_FOUND", "no consumer 'x'"),
        (service_pb2.SampleRequest(consumer="trainer"), "INVALID_ARGUMENT", "batch_size 0"),
        (
            service_pb2.SampleRequest(consumer="trainer", batch_size=1, lease_seconds=1e9),
            "INVALID_ARGUMENT",
            "lease_seconds",
        ),
        (
            service_pb2.SampleRequest(
                consumer="trainer", batch_size=1, timeout_seconds=float("nan")
            ),
            "INVALID_ARGUMENT",
            "timeout nan",
        ),
        (service_pb2.SealGroupRequest(group="7/9"), "NOT_FOUND", "no member of group '7/9'"),
        (service_pb2.PublishPolicyVersionRequest(version=-1), "INVALID_ARGUMENT", "version -1"),
        (service_pb2.RewindRequest(consumer="trainer", step=-2), "INVALID_ARGUMENT", "-1"),
        *(
            (
                service_pb2.ExtendLeaseRequest(lease_id=1, lease_seconds=seconds),
                "INVALID_ARGUMENT",
                "lease_seconds",
            )
            for seconds in (-1.0, float("nan"), 1e9)
        ),
    ],
)
def test_bad_requests_name_what_is_wrong(
    stub: Stub, name: str, request_: object, code: str, text: str
) -> None:
    create(stub, name)
    request_.buffer = name  # type: ignore[attr-defined]
    method = type(request_).__name__.removesuffix("Request")
    found, message, _ = error_of(lambda: getattr(stub, method)(request_))
    assert found == code
    assert text in message


# --- buffers


def test_buffers_are_created_changed_listed_and_deleted(stub: Stub, name: str) -> None:
    create(stub, name, group_size=3, estimator="gae", parameters={"lam": 0.9})
    buffer = stub.GetBuffer(service_pb2.GetBufferRequest(name=name)).buffer
    assert (buffer.config.group_size, buffer.config.lease_seconds) == (3, 600.0)
    assert buffer.config.advantage.parameters["lam"] == 0.9
    assert [c.name for c in buffer.config.consumers] == ["trainer"]
    assert not buffer.HasField("policy_version")
    again = service_pb2.CreateBufferRequest(config=buffer.config)
    assert error_of(lambda: stub.CreateBuffer(again))[0] == "ALREADY_EXISTS"
    again.exist_ok = True
    assert stub.CreateBuffer(again).buffer == buffer
    again.config.group_size = 5
    assert error_of(lambda: stub.CreateBuffer(again))[0] == "ALREADY_EXISTS"
    update = service_pb2.UpdateBufferRequest(config=again.config)
    update.update_mask.paths.append("group_size")
    assert stub.UpdateBuffer(update).buffer.config.group_size == 5
    update.config.advantage.estimator = "gea"
    update.update_mask.paths[:] = ["advantage"]
    code, text, _ = error_of(lambda: stub.UpdateBuffer(update))
    assert (code, "unknown estimator 'gea'" in text) == ("INVALID_ARGUMENT", True)
    listed = stub.ListBuffers(service_pb2.ListBuffersRequest()).buffers
    assert name in [one.config.name for one in listed]
    update.config.advantage.Clear()
    stub.UpdateBuffer(update)
    push(stub, name, group(0, 2))
    update.config.group_by = config_pb2.GROUP_BY_RUN
    update.update_mask.paths[:] = ["group_by"]
    assert error_of(lambda: stub.UpdateBuffer(update))[0] == "FAILED_PRECONDITION"
    delete = service_pb2.DeleteBufferRequest(name=name)
    assert error_of(lambda: stub.DeleteBuffer(delete))[0] == "FAILED_PRECONDITION"
    delete.force = True
    assert stub.DeleteBuffer(delete).num_items == 2
    assert error_of(lambda: stub.DeleteBuffer(delete))[0] == "NOT_FOUND"
    create(stub, name)
    assert states(stub, name) == [], "a new buffer of an old name is empty"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"pacing": Pacing(consumer="nobody", max_staleness=1, batch_size=2)},
            "'nobody' is none of the consumers",
        ),
        ({"pacing": Pacing(consumer="trainer", max_staleness=1, batch_size=0)}, "batch_size"),
        ({"max_times_sampled": 2}, "need replay = true"),
        ({"with_replacement": True}, "need replay = true"),
        ({"selector": Selector("prioritized", exponent=11)}, "exponent"),
        ({"selector": Selector("staleness", decay=0.0)}, "decay"),
        ({"selector": Selector("staleness", decay=1.5)}, "decay"),
        ({"raw": True, "selector": "advantage"}, "raw consumer"),
    ],
)
def test_impossible_settings_are_refused(
    client: Client, name: str, config: dict[str, Any], complaint: str
) -> None:
    pacing = config.get("pacing")
    trainer = ConsumerConfig("trainer", **({} if pacing else config))
    with pytest.raises(InvalidRequestError, match=complaint):
        client.create_buffer(BufferConfig(name, consumers=(trainer,), pacing=pacing))


def test_deleting_a_buffer_ends_who_waits(stub: Stub, name: str) -> None:
    create(stub, name)
    waiting = stub.Sample.future(
        service_pb2.SampleRequest(buffer=name, consumer="trainer", batch_size=1, timeout_seconds=60)
    )
    eventually(lambda: stats(stub, name).consumers[0].num_waiting == 1, "the call to wait")
    stub.DeleteBuffer(service_pb2.DeleteBufferRequest(name=name))
    assert "was removed" in waiting.result(timeout=20).shortfall
