"""Memory shared with clients, from the server's side: who gets it, how much, and what is told of it."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress

import pytest

from experience_buffer._messages.shared_memory import MIN_BYTES, PUSH_BYTES, attach, machine
from experience_buffer.errors import InvalidRequestError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1.types_pb2 import MemoryRequest, MemorySpan
from experience_buffer_server.runtime.memory_arena import BLOCK_BYTES
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.runtime.shared_memory import (
    SAMPLE_BYTES,
    PushMemory,
    SampleMemory,
    SharedMemory,
)

HERE = MemoryRequest(machine=machine())
BOTH = PUSH_BYTES + SAMPLE_BYTES


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def shared(metrics: Metrics) -> SharedMemory:
    return SharedMemory(BOTH, metrics)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"experience_buffer_{name}", labels)


def pushing(shared: SharedMemory) -> PushMemory:
    memory = shared.for_pushes(HERE)
    assert memory is not None
    return memory


def sampling(shared: SharedMemory) -> SampleMemory:
    memory = shared.for_samples(HERE)
    assert memory is not None
    return memory


def open_descriptors() -> int:
    """Those of memory: others may close meanwhile, of connections that earlier tests had."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:" in link for link in links)


# --- who gets it


@pytest.mark.parametrize("elsewhere", ["", "x", machine()[:-1], machine() + "1"])
def test_only_who_is_on_this_machine_gets_any(
    shared: SharedMemory, metrics: Metrics, elsewhere: str
) -> None:
    asked = MemoryRequest(machine=elsewhere)
    assert shared.for_pushes(asked) is None
    assert shared.for_samples(asked) is None
    assert value(metrics, "shared_memory_streams_total", result="elsewhere") == 2
    assert value(metrics, "shared_memory_bytes") == 0


def test_where_the_machine_has_no_name_nobody_gets_any(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics
) -> None:
    monkeypatch.setattr("experience_buffer._messages.shared_memory.machine", lambda: "")
    assert SharedMemory(BOTH, metrics).for_pushes(MemoryRequest(machine="")) is None


def test_there_is_so_much_and_what_is_closed_serves_again(
    shared: SharedMemory, metrics: Metrics
) -> None:
    before = open_descriptors()
    push, sample = pushing(shared), sampling(shared)
    assert value(metrics, "shared_memory_bytes") == BOTH
    assert shared.for_pushes(HERE) is None
    assert shared.for_samples(HERE) is None
    assert value(metrics, "shared_memory_streams_total", result="max_shared_bytes") == 2
    assert value(metrics, "shared_memory_streams_total", result="shared") == 2
    for memory in (push, sample):
        memory.close()
        memory.close()
    assert value(metrics, "shared_memory_bytes") == 0
    assert open_descriptors() == before
    pushing(shared).close()
    sampling(shared).close()


@pytest.mark.parametrize("refusing", ["os.memfd_create", "os.ftruncate", "mmap.mmap"])
def test_where_the_system_has_none_streams_go_without(
    shared: SharedMemory,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusing: str,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = open_descriptors()
    monkeypatch.setattr(refusing, refuse)
    with caplog.at_level(logging.WARNING):
        assert shared.for_pushes(HERE) is None
        assert shared.for_samples(HERE) is None
    assert caplog.text.count("Cannot allocate memory") == 2
    assert value(metrics, "shared_memory_streams_total", result="system") == 2
    assert value(metrics, "shared_memory_streams_total", result="shared") == 0
    assert value(metrics, "shared_memory_bytes") == 0
    assert open_descriptors() == before


@pytest.mark.parametrize("make", [pushing, sampling])
def test_nobody_can_change_its_size(
    shared: SharedMemory, make: Callable[[SharedMemory], PushMemory | SampleMemory]
) -> None:
    """Else a client would end the server, which has it mapped, by making it smaller."""
    memory = make(shared)
    offer = memory.offer()
    if isinstance(offer, bytes):
        offer = pb.SampleStreamResponse.FromString(offer).memory
    path = f"/proc/{offer.process_id}/fd/{offer.descriptor}"
    theirs = os.open(path, os.O_RDWR)
    try:
        for num_bytes in (0, offer.num_bytes - 1, offer.num_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(theirs, num_bytes)
    finally:
        os.close(theirs)
        memory.close()


# --- pushes


def test_payloads_are_what_the_client_has_put_there(shared: SharedMemory) -> None:
    memory = pushing(shared)
    theirs = attach(memory.offer(), writable=True)
    theirs[5:8], theirs[-3:] = b"abc", b"xyz"
    spans = [MemorySpan(offset=PUSH_BYTES - 3, num_bytes=3), MemorySpan(offset=5, num_bytes=3)]
    found = memory.payloads(spans)
    memory.close()
    assert found == [b"xyz", b"abc"], "views outlive the stream"
    assert all(view.readonly for view in found)


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, 0), (0, PUSH_BYTES + 1), (PUSH_BYTES, 1), (1, PUSH_BYTES), (2**64 - 1, 2**64 - 1)],
)
def test_payloads_that_aren_t_there_are_the_clients_error(
    shared: SharedMemory, offset: int, num_bytes: int
) -> None:
    memory = pushing(shared)
    spans = [MemorySpan(offset=0, num_bytes=1), MemorySpan(offset=offset, num_bytes=num_bytes)]
    with pytest.raises(InvalidRequestError, match="spans: "):
        memory.payloads(spans)
    memory.close()


# --- samples


def test_responses_lie_there_until_they_are_released(shared: SharedMemory) -> None:
    memory = sampling(shared)
    pieces: list[bytes | memoryview] = [b"head", memoryview(os.urandom(9 << 20)), b"tail"]
    assert memory.put(pieces) is None, "not before the client has it"
    memory.is_ready = True
    offer = pb.SampleStreamResponse.FromString(memory.offer()).memory
    theirs = attach(offer, writable=False)
    spans = []
    while (message := memory.put(pieces)) is not None:
        spans.append(pb.SampleStreamResponse.FromString(message).span)
    assert len(spans) == 3
    for span in spans:
        assert theirs[span.offset : span.offset + span.num_bytes] == b"".join(pieces)
    memory.release(spans[1])
    message = memory.put([bytes(MIN_BYTES)])
    assert message is not None
    assert pb.SampleStreamResponse.FromString(message).span.offset == spans[1].offset
    memory.close()
    assert memory.put(pieces) is None
    assert bytes(theirs[spans[2].offset :][:4]) == b"head", "the client keeps its own"


def test_little_travels_in_its_message(shared: SharedMemory) -> None:
    memory = sampling(shared)
    memory.is_ready = True
    assert memory.put([bytes(MIN_BYTES - 1)]) is None
    assert memory.put([bytes(MIN_BYTES)]) is not None
    memory.close()


def test_only_what_lies_there_is_released_and_once(shared: SharedMemory) -> None:
    memory = sampling(shared)
    memory.is_ready = True
    message = memory.put([bytes(2 * BLOCK_BYTES + MIN_BYTES)])
    assert message is not None
    span = pb.SampleStreamResponse.FromString(message).span
    for offset in (span.offset + BLOCK_BYTES, 2**64 - 1):
        with pytest.raises(InvalidRequestError, match="release each once"):
            memory.release(MemorySpan(offset=offset))
    memory.release(span)
    with pytest.raises(InvalidRequestError, match="release each once"):
        memory.release(span)
    memory.close()
