"""Health, reflection, metrics, and the server's orderly end."""

from __future__ import annotations

import signal
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.plain import (
    NONE,
    STORED,
    create,
    error_of,
    group,
    push,
    push_request,
    sample,
    stats,
    summaries,
)
from tests.integration.server import MakeServer, Server, Stub, eventually
from tests.integration.streams import Spoken, SpokenStream

SERVICE = "experience_buffer.v1.ExperienceBuffer"


@pytest.mark.parametrize("early", [True, False])
def test_the_compute_worker_starts_with_the_server_unless_told(
    make_server: MakeServer, early: bool
) -> None:
    """Before anybody has made a buffer that needs it."""
    server = make_server(environment={"EXPERIENCE_BUFFER_COMPUTE__START_EARLY": str(early)})
    if early:
        eventually(lambda: "computing advantages" in server.tail(), "it to be ready")
    assert len(server.children("compute.worker")) == early
    url = f"http://127.0.0.1:{server.metrics_port}/health"
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.read() == b"SERVING\n"
    assert server.stop() == 0


def test_health_reflection_and_metrics_answer(shared_server: Server) -> None:
    with shared_server.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listed = health.List(health_pb2.HealthListRequest()).statuses
        assert {service: one.status for service, one in listed.items()} == {"": 1, SERVICE: 1}
        unknown = health_pb2.HealthCheckRequest(service="no-such")
        assert error_of(lambda: health.Check(unknown))[0] == "NOT_FOUND"
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        [found] = reflection.ServerReflectionInfo(iter([asked]))
        services = {one.name for one in found.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= services
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        [described] = reflection.ServerReflectionInfo(iter([asked]))
        assert described.file_descriptor_response.file_descriptor_proto
    assert "grpc_server_handled_total" in shared_server.metrics()


# --- the end


def test_sigterm_drains(make_server: MakeServer, name: str) -> None:
    server = make_server()
    with server.channel() as channel:
        stub = Stub(channel)
        create(stub, name, group_by=NONE)
        push(stub, name, group(0, 2))
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        samples, unopened = SpokenStream(stub.SampleStream), SpokenStream(stub.SampleStream)
        samples.open(name, 2, credits=3, timeout_seconds=60)
        assert len(samples.next().frame.experiences) == 2
        pushes = Spoken(stub.PushStream)
        pushes.send(service_pb2.PushStreamRequest(push=push_request(name, group(1, 1))))
        assert next(pushes.call).response.outcomes[0].status == STORED
        waiting = stub.Sample.future(
            service_pb2.SampleRequest(
                buffer=name, consumer="trainer", batch_size=5, timeout_seconds=60
            )
        )
        eventually(lambda: stats(stub, name).consumers[0].num_waiting == 2, "both to wait")
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for spoken in (samples, pushes, unopened):
            stream = spoken.call
            assert not any(hasattr(message, "frame") and message.frame.last for message in stream)
            assert stream.code() is grpc.StatusCode.OK
            spoken.end()
        assert waiting.result(timeout=20).shortfall
        assert server.wait() == 0
        assert time.monotonic() - started < 5, "less than the grace period of 10 s"
    server.start()
    with server.stub() as stub:
        assert summaries(stub, name)[0].state == types_pb2.EXPERIENCE_STATE_READY
        assert len(sample(stub, name, 3).experiences) == 3, "its leases came back with the stream"


def test_an_idle_server_stops_at_once_on_both_signals(make_server: MakeServer) -> None:
    server = make_server()
    for number in (signal.SIGINT, signal.SIGTERM):
        started = time.monotonic()
        server.signal(number)
        assert server.wait() == 0
        assert time.monotonic() - started < 5
        server.start()
