"""Tokens and roles on real servers: who may make which call, for which buffer, and for how long."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from experience_buffer import (
    AsyncClient,
    BufferConfig,
    BufferNotFoundError,
    Client,
    ForbiddenError,
    UnauthenticatedError,
)
from experience_buffer.status import from_rpc_error
from experience_buffer.v1 import service_pb2
from tests.integration.credentials import bearer, entry, refused_scrape, write
from tests.integration.plain import error_of, experience, group
from tests.integration.server import Server, Stub, eventually, serving
from tests.integration.streams import Spoken, SpokenStream, ending

SERVICE = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "access.md").read_text(encoding="utf-8")
TOML = """
[server]
max_message_bytes = 65536

[access]
file = "access.toml"

[buffers.math]
[buffers.secret]
"""
ROLES = ("push", "sample", "look", "operate", "metrics")
TABLE = {
    name: {role for role, cell in zip(ROLES, cells, strict=False) if cell == "yes"}
    for name, *cells in (
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in DOCUMENT.splitlines()
        if re.match(r"\| `[A-Z]", line)
    )
}
WITHOUT_A_BUFFER = {"ListBuffers", "GetStats"}
DENIED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


def access_file(server: Server) -> Path:
    return server.folder / "access.toml"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which each role has a token of its name, for buffers that begin with math."""
    server = Server(tmp_path_factory.mktemp("guarded"), toml=TOML)
    entries = [entry(role, role, buffers=["math*"]) for role in ROLES]
    write(access_file(server), *entries, entry("root", "operate"))
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose access file the tests rewrite; only the operator's token stays."""
    server = Server(tmp_path_factory.mktemp("changing"), toml=TOML)
    write(access_file(server), entry("root", "operate"))
    try:
        yield server.start()
        assert server.stop() == 0
        assert "Traceback" not in server.tail(10_000)
    finally:
        server.close()


def grant(server: Server, *entries: Any) -> None:
    """Give a running server other grants, and wait until it has taken them."""
    num_lines = len(server.log)
    write(access_file(server), *entries, entry("root", "operate"))
    eventually(
        lambda: any('"access: read again"' in line for line in server.log[num_lines:]),
        "the grants to be taken",
    )


def request_for(method: Any, buffer: str) -> Any:
    """The plainest request that names a buffer."""
    request = GetMessageClass(method.input_type)()
    for path in ("push.buffer", "open.buffer", "config.name", "buffer", "name"):
        *outer, last = path.split(".")
        target: Any = request
        for part in outer:
            target = getattr(target, part, None)
        if target is not None and last in target.DESCRIPTOR.fields_by_name:
            setattr(target, last, buffer)
            return request
    return request


def code_of(
    channel: grpc.Channel, method: Any, buffer: str, metadata: Any = ()
) -> tuple[grpc.StatusCode, str]:
    """How a call ends, or that it has begun to answer."""
    request = request_for(method, buffer)
    said = iter([request]) if method.client_streaming else request
    try:
        answer = getattr(Stub(channel), method.name)(said, metadata=metadata, timeout=20)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        call: Any = error
        return call.code(), call.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_make_the_calls_of_the_table(guarded: Server, role: str) -> None:
    """For its buffers; what it isn't told is whether others exist."""
    metadata = bearer(role)
    with guarded.channel() as channel:
        for method in SERVICE.methods:
            covered = f"math-{role}-{method.name}"
            code, text = code_of(channel, method, covered, metadata)
            if role not in TABLE[method.name]:
                assert code is grpc.StatusCode.PERMISSION_DENIED, method.name
                assert f"it has {role}" in text or role == "operate", text
                continue
            if method.name != "Snapshot":
                assert code not in DENIED, f"{method.name}: {text}"
            if method.name in WITHOUT_A_BUFFER:
                continue
            texts = {
                code_of(channel, method, buffer, metadata)[1].replace(buffer, "?")
                for buffer in ("secret", "absent")
            }
            assert len(texts) == 1, texts
            assert "takes the role" in texts.pop()


@pytest.mark.parametrize("metadata", [(), bearer("nobody"), (("authorization", "Basic eA=="),)])
def test_without_a_token_nothing_is_served(guarded: Server, metadata: Any) -> None:
    with guarded.channel() as channel:
        for method in SERVICE.methods:
            code, text = code_of(channel, method, "math", metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED, method.name
            assert "math" not in text
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(_reflect(channel, metadata))
        assert from_rpc_error(caught.value, doing="").reason == "UNAUTHENTICATED"
        assert next(_reflect(channel, bearer("metrics"))).list_services_response.service


def _reflect(channel: grpc.Channel, metadata: Any) -> Iterator[Any]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers: Iterator[Any] = stub.ServerReflectionInfo(iter([request]), metadata=metadata)
    return answers


def test_the_whole_server_takes_a_grant_on_all_buffers(guarded: Server) -> None:
    snapshot = SERVICE.methods_by_name["Snapshot"]
    with guarded.channel() as channel:
        code, text = code_of(channel, snapshot, "", bearer("operate"))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "for the whole server" in text
        assert code_of(channel, snapshot, "", bearer("root"))[0] not in DENIED


def test_others_buffers_are_not_shown(guarded: Server) -> None:
    with (
        Client(guarded.address, token="root") as root,
        Client(guarded.address, token="sample") as client,
    ):
        root.create_buffer(BufferConfig("mathematics"), exist_ok=True)
        assert {"math", "mathematics", "secret"} <= {
            info.config.name for info in root.list_buffers()
        }
        for names in (
            {info.config.name for info in client.list_buffers()},
            {stats.name for stats in client.get_stats().buffers},
        ):
            assert {"math", "mathematics"} <= names
            assert "secret" not in names
        with pytest.raises(BufferNotFoundError) as caught:
            list(client.list(buffer="math-none"))
        assert "secret" not in str(caught.value)


def test_a_lease_names_the_token_and_the_stores_place_is_for_who_may_see_all(
    guarded: Server,
) -> None:
    with (
        Client(guarded.address, token="root") as root,
        Client(guarded.address, token="sample") as trainer,
        Client(guarded.address, token="look") as onlooker,
    ):
        root.push(group("leased", 1), buffer="math")
        batch = trainer.sample(1, buffer="math")
        (lease,) = [one for one in onlooker.list_leases(buffer="math") if one.id == batch.lease_id]
        assert lease.caller == "sample"
        assert lease.holder in lease.held_by
        batch.ack()
        told, kept = root.get_stats().disk, onlooker.get_stats("math").disk
        assert told is not None
        assert kept is not None
        assert (bool(told.place), kept.place) == (True, "")


def test_each_message_of_a_push_stream_is_checked(guarded: Server) -> None:
    with (
        guarded.stub() as stub,
        ending(Spoken(partial(stub.PushStream, metadata=bearer("push")))) as stream,
    ):
        for number, buffer in enumerate(["math", "math", "secret"]):
            push = service_pb2.PushRequest(buffer=buffer)
            stream.send(service_pb2.PushStreamRequest(sequence=number, push=push))
            if buffer == "math":
                assert next(stream.call).sequence == number
        assert "buffer 'secret'" in error_of(lambda: next(stream.call))[1]


def test_a_refused_request_is_not_read(guarded: Server) -> None:
    """Far above what the server receives, it would be refused for its size once it is read."""
    request = service_pb2.PushRequest(buffer="math", payload=b"x" * 2**20)
    with guarded.stub() as stub:
        for metadata, expected in [
            ((), "UNAUTHENTICATED"),
            (bearer("sample"), "PERMISSION_DENIED"),
            (bearer("push"), "RESOURCE_EXHAUSTED"),
        ]:
            push = partial(stub.Push, request, metadata=metadata, timeout=20)
            assert error_of(push)[0] == expected


def test_metadata_has_a_bound(guarded: Server) -> None:
    with guarded.stub() as stub:
        ask = partial(stub.ListBuffers, service_pb2.ListBuffersRequest())
        ask(metadata=(*bearer("push"), ("x", "y" * 4000)))
        much = (*bearer("push"), ("x", "y" * 40_000))
        assert error_of(lambda: ask(metadata=much))[0] == "RESOURCE_EXHAUSTED"


async def test_clients_raise_the_errors_of_access_at_once(guarded: Server) -> None:
    """And don't try again, neither on calls nor on streams."""
    with Client(guarded.address) as client:
        with pytest.raises(UnauthenticatedError, match="carries no token"):
            client.push([experience(1, 0)], buffer="math")
        with pytest.raises(UnauthenticatedError), client.stream(1, buffer="math") as batches:
            next(iter(batches))
    with Client(guarded.address, token="push") as client:
        with pytest.raises(ForbiddenError, match="takes the role operate or sample, it has push"):
            client.sample(1, buffer="math")
        writer = client.writer(buffer="secret")
        writer.append(experience(1, 0))
        with pytest.raises(ForbiddenError, match="'secret'"):
            writer.close()
    async with AsyncClient(guarded.address, token="nobody") as client:
        with pytest.raises(UnauthenticatedError, match="unknown to this server, or was revoked"):
            await client.get_stats()


def test_open_calls_end_with_their_grant(changing: Server) -> None:
    """A revoked token ends what it began, and nothing else; so does one that may do less."""
    both = [entry("worker", "push", "sample", token=token) for token in ("old", "new")]
    grant(changing, *both)
    with changing.channel() as channel:
        calls = {
            (token, kind): opened
            for token in ("old", "new")
            for kind, opened in _long_calls(Stub(channel), bearer(token)).items()
        }
        grant(changing, both[1])
        for (token, kind), opened in calls.items():
            if token == "old":
                assert _end_of(opened) is grpc.StatusCode.UNAUTHENTICATED, kind
        assert all(call.is_active() for (token, _), call in calls.items() if token == "new")
        narrowed = entry("worker", "sample", token="new", buffers=["secret"])
        grant(changing, narrowed)
        for (token, kind), opened in calls.items():
            if token == "new":
                assert _end_of(opened) is grpc.StatusCode.PERMISSION_DENIED, kind
        again = _long_calls(Stub(channel), bearer("new"), buffer="secret")
        assert again.pop("push stream").exception() is not None
        path = access_file(changing)
        path.write_text(path.read_text("utf-8") + "broken", encoding="utf-8")
        eventually(lambda: "can't be used" in changing.tail(), "the broken file to be seen")
        assert all(call.is_active() for call in again.values())
        for call in again.values():
            call.cancel()
    assert "Traceback" not in changing.tail(1000)


def _long_calls(stub: Stub, metadata: Any, *, buffer: str = "math") -> dict[str, Any]:
    """Calls that wait, all begun."""
    samples = SpokenStream(partial(stub.SampleStream, metadata=metadata))
    samples.open(buffer, 1)
    samples.say(extend=service_pb2.ExtendLeaseRequest(lease_id=99))
    pushes = Spoken(partial(stub.PushStream, metadata=metadata))
    pushes.send(service_pb2.PushStreamRequest(push=service_pb2.PushRequest(buffer=buffer)))
    calls: dict[str, Any] = {
        "sample stream": samples.call,
        "push stream": pushes.call,
        "watch": stub.WatchPolicyVersion(
            service_pb2.WatchPolicyVersionRequest(buffer=buffer), metadata=metadata
        ),
    }
    for name, call in calls.items():
        if name != "push stream" or buffer == "math":
            next(call)
    request = service_pb2.SampleRequest(
        buffer=buffer, consumer="trainer", batch_size=1, timeout_seconds=600
    )
    calls["sample"] = stub.Sample.future(request, metadata=metadata)
    asked = service_pb2.GetStatsRequest(buffer=buffer)
    eventually(
        lambda: stub.GetStats(asked, metadata=metadata).buffers[0].consumers[0].num_waiting,
        "the sample call to wait",
    )
    for call in calls.values():
        if not hasattr(call, "is_active"):
            call.is_active = call.running
    return calls


def _end_of(call: Any) -> grpc.StatusCode:
    """The status that a call ends with, soon."""
    eventually(lambda: not call.is_active(), "a call to end")
    found: grpc.StatusCode = call.code()
    return found


def test_a_stream_ends_when_its_grant_expires(changing: Server) -> None:
    request = service_pb2.WatchPolicyVersionRequest(buffer="math")
    grant(changing, entry("worker", "sample"))
    with changing.stub() as stub:
        versions = stub.WatchPolicyVersion(request, metadata=bearer("worker"))
        next(versions)
        expires = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=4)
        grant(changing, entry("worker", "sample", expires=expires))
        assert versions.is_active()
        with pytest.raises(grpc.RpcError) as caught:
            next(versions)
    error = from_rpc_error(caught.value, doing="")
    assert isinstance(error, UnauthenticatedError)
    assert "the grant of 'worker' has expired" in str(error)
    assert datetime.now(UTC) >= expires


def test_a_client_hears_of_its_revocation(changing: Server) -> None:
    """Its streams don't take it for a broken connection, and give leases back."""
    grant(changing, entry("trainer", "sample"))
    with (
        Client(changing.address, token="root") as root,
        Client(changing.address, token="trainer") as trainer,
    ):
        root.push(group("task", 2), buffer="math", group_size=2)
        with trainer.stream(1, buffer="math") as stream:
            batches = iter(stream)
            next(batches)
            write(access_file(changing), entry("root", "operate"))
            with pytest.raises(UnauthenticatedError, match="revoked"):
                list(batches)
        with root.stream(2, buffer="math", min_batch_size=2) as batches:
            assert len(next(iter(batches)).uids) == 2


def audit_lines(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Entries of the audit log with these fields."""
    lines = [
        json.loads(line) for line in tuple(server.log) if '"experience_buffer_server.audit"' in line
    ]
    return [line for line in lines if fields.items() <= line.items()]


def test_refusals_and_administration_are_logged_and_counted(changing: Server) -> None:
    server = changing
    grant(server, entry("worker", "push", token="a-secret-token"))
    with (
        Client(server.address, token="root") as root,
        Client(server.address, token="a-secret-token") as worker,
        Client(server.address, token="another-secret") as nobody,
    ):
        root.create_buffer(BufferConfig("eval"))
        root.push(group("t", 1), buffer="eval")
        worker.drop_group("0/t", buffer="eval", reason="because")
        root.delete_buffer("eval", force=True)
        with pytest.raises(BufferNotFoundError):
            root.delete_buffer("eval")
        with pytest.raises(ForbiddenError):
            worker.delete_buffer("math")
        for _ in range(50):
            with pytest.raises(UnauthenticatedError):
                nobody.get_stats()
    expected = {
        "who": "root",
        "method": "DeleteBuffer",
        "buffer": "eval",
        "message": "administered",
    }
    done = eventually(lambda: audit_lines(server, **expected, outcome="OK"), "the line")[0]
    assert done["request"] == {"name": "eval", "force": True}
    assert done["peer"].startswith("ipv4:127.0.0.1:")
    assert audit_lines(server, **expected, outcome="NOT_FOUND")
    assert audit_lines(server, who="root", method="CreateBuffer", buffer="eval", outcome="OK")
    (dropped,) = audit_lines(server, who="worker", method="DropGroup", buffer="eval")
    assert dropped["request"] == {"buffer": "eval", "group": "0/t", "reason": "because"}
    refused = {"message": "refused", "level": "WARNING"}
    assert audit_lines(server, **refused, who="worker", method="DeleteBuffer", reason="role")
    unknown = audit_lines(server, **refused, who="127.0.0.1", method="GetStats")
    assert len(unknown) == 5
    assert "a-secret" not in server.tail(10_000)
    assert "another-secret" not in server.tail(10_000)
    body = server.metrics("root")
    counter = "experience_buffer_access_refusals_total"
    assert f'{counter}{{method="GetStats",reason="unknown_token"}} 50.0' in body
    assert f'{counter}{{method="DeleteBuffer",reason="role"}} 1.0' in body


def test_metrics_take_a_token_too(guarded: Server) -> None:
    for nobody in ("", "nobody"):
        with refused_scrape(401):
            guarded.metrics(nobody)
    with refused_scrape(403, "takes the role metrics or operate, it has push"):
        guarded.metrics("push")
    for token in ("metrics", "operate"):
        assert "experience_buffer_items" in guarded.metrics(token)
