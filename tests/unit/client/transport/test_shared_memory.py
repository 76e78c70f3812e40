"""Memory shared with a server, from the client's side: what is taken, what goes where, what is refused."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer import Experience, trxp
from experience_buffer._messages import push_bytes, sample_bytes, shared_memory
from experience_buffer._messages.batch_data import LazyPayloads
from experience_buffer._messages.push_bytes import Payload
from experience_buffer._messages.shared_memory import MIN_BYTES, attach, machine, part
from experience_buffer._transport.push_memory import PushMemory
from experience_buffer._transport.push_queue import Request
from experience_buffer._transport.sample_memory import SampleMemory
from experience_buffer._transport.sample_plan import FrameAssembler
from experience_buffer.errors import InternalServerError
from experience_buffer.v1 import service_pb2 as pb
from experience_buffer.v1.types_pb2 import MemorySpan, SampledExperience, SharedMemory
from tests.unit.client.stream_plans import PLAN

NAME = "experience-buffer-" + "0123456789abcdef" * 2
NUM_BYTES = 1 << 20
FIELDS = push_bytes.push_fields(buffer="math", group_size=7)


class Made:
    """Memory as a server makes it."""

    def __init__(self, name: str = NAME, num_bytes: int = NUM_BYTES) -> None:
        self.descriptor = os.memfd_create(name)
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = mmap.mmap(self.descriptor, num_bytes)
        self.offer = SharedMemory(
            process_id=os.getpid(), descriptor=self.descriptor, name=name, num_bytes=num_bytes
        )

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self.descriptor)


@pytest.fixture
def made() -> Iterator[Made]:
    with Made() as found:
        yield found


# --- which machine, and whose memory


def test_a_machine_is_its_boot_and_its_processes() -> None:
    boot, _, namespace = machine().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace == str(os.stat("/proc/self/ns/pid").st_ino)


@pytest.mark.parametrize("missing", ["_BOOT", "_NAMESPACE"])
def test_who_can_t_say_where_it_is_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(shared_memory, missing, "/nowhere")
    assert machine() == ""
    assert PushMemory(FIELDS, is_wanted=True).opening() == []


def test_other_systems_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine() == ""


def test_what_one_side_writes_the_other_reads(made: Made) -> None:
    theirs = attach(made.offer, writable=True)
    theirs[7:10] = b"abc"
    assert made.memory[7:10] == b"abc"
    readable = attach(made.offer, writable=False)
    assert readable.readonly
    assert bytes(readable[7:10]) == b"abc"


def test_only_memory_of_the_offered_name_is_opened(made: Made, tmp_path: Path) -> None:
    """Whatever else has that number may be a terminal, a device or a pipe that blocks who opens it."""
    reading, writing = os.pipe()
    secret = os.open(tmp_path, os.O_RDONLY)
    others = Made(name=NAME[:-1] + "0")
    try:
        for descriptor in (reading, writing, secret, others.descriptor):
            made.offer.descriptor = descriptor
            with pytest.raises(ValueError, match="where the server has its shared memory"):
                attach(made.offer, writable=True)
    finally:
        for descriptor in (reading, writing, secret, others.descriptor):
            os.close(descriptor)


@pytest.mark.parametrize("name", ["", "outbox", NAME + "0", NAME.upper(), f"../{NAME}", NAME[:-1]])
def test_names_that_no_server_gives_are_refused(made: Made, name: str) -> None:
    made.offer.name = name
    with pytest.raises(ValueError, match="names its shared memory"):
        attach(made.offer, writable=False)


def test_memory_of_another_size_is_refused(made: Made) -> None:
    """To read behind the end of what a file has would end the process."""
    made.offer.num_bytes += 1
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=f"has not {NUM_BYTES + 1} bytes"):
        attach(made.offer, writable=False)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_memory_that_is_gone_is_an_error_of_the_system(made: Made) -> None:
    made.offer.descriptor = 999_999
    with pytest.raises(FileNotFoundError):
        attach(made.offer, writable=False)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_part_lies_in_the_memory_or_is_none(offset: int, num_bytes: int) -> None:
    memory = memoryview(bytes(range(251)))
    span = MemorySpan(offset=offset, num_bytes=num_bytes)
    if num_bytes > 0 and offset + num_bytes <= 251:
        assert part(memory, span) == memory[offset : offset + num_bytes]
    else:
        with pytest.raises(ValueError, match="don't lie in shared memory of 251"):
            part(memory, span)


@given(st.integers(0, 250), st.integers(0, 252))
def test_parts_at_the_edges(offset: int, num_bytes: int) -> None:
    test_a_part_lies_in_the_memory_or_is_none.hypothesis.inner_test(offset, num_bytes)  # type: ignore[attr-defined]


# --- pushes


def request(sequence: int, *sizes: int) -> Request:
    payloads = [os.urandom(size) for size in sizes]
    return Request(sequence, FIELDS, payloads, range(len(sizes)), sum(sizes))


@pytest.fixture
def memory(made: Made) -> PushMemory:
    found = PushMemory(FIELDS, is_wanted=True)
    found.offered(made.offer)
    return found


def sent(memory: PushMemory, each: Request) -> bytes:
    assert memory.reserve(each)
    return memory.message(each)


def read(made: Made, data: bytes) -> tuple[pb.PushStreamRequest, list[bytes]]:
    message = pb.PushStreamRequest.FromString(data)
    inline = [message.push.payload, *message.push.payloads]
    spans = [bytes(made.memory[s.offset : s.offset + s.num_bytes]) for s in message.spans]
    return message, [payload for payload in [*inline, *spans] if payload]


def test_the_first_message_asks_and_names_the_buffer() -> None:
    [opening] = PushMemory(FIELDS, is_wanted=True).opening()
    message = pb.PushStreamRequest.FromString(opening)
    assert (message.memory.machine, message.sequence) == (machine(), 0)
    assert (message.push.buffer, message.push.payload) == ("math", b"")
    assert PushMemory(FIELDS, is_wanted=False).opening() == []


def test_payloads_lie_in_the_memory_until_they_are_answered(made: Made, memory: PushMemory) -> None:
    requests = [request(number, 50_021, 40_009, 100_003) for number in range(1, 6)]
    messages = [sent(memory, each) for each in requests]
    spans = []
    for each, data in zip(requests, messages, strict=True):
        assert len(data) < 200
        message, payloads = read(made, data)
        assert (message.sequence, message.push.buffer) == (each.sequence, "math")
        assert message.push.group_size == 7
        assert payloads == each.payloads
        spans += [(span.offset, span.offset + span.num_bytes) for span in message.spans]
    spans.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    sixth = request(6, 190_027)
    assert not memory.reserve(sixth), "it waits for room"
    memory.answered(2)
    message, payloads = read(made, sent(memory, sixth))
    assert payloads == sixth.payloads
    assert [span.offset for span in message.spans] == [spans[3][0]]
    for each, data in zip(requests, messages, strict=True):
        if each.sequence != 2:
            assert read(made, data)[1] == each.payloads, "nothing under way is written over"


def test_what_is_answered_twice_or_wasn_t_there_frees_nothing(
    made: Made, memory: PushMemory
) -> None:
    first, second = request(1, 500_009), request(2, 500_009)
    memory.answered(0)
    sent(memory, first)
    memory.answered(1)
    memory.answered(1)
    sent(memory, second)
    memory.answered(1)
    assert not memory.reserve(request(3, 600_011))
    assert read(made, sent(memory, request(4, 500_009)))[0].spans
    assert not memory.reserve(request(5, 500_009))


def test_where_there_is_no_room_to_wait_for_payloads_travel_in_the_message(
    made: Made, memory: PushMemory
) -> None:
    larger = request(1, NUM_BYTES + 1)
    assert sent(memory, larger) == larger.message()
    _, kept = place(memory, 600_000)
    other = request(2, 600_011)
    assert sent(memory, other) == other.message(), "what has the room isn't under way"
    under_way = holding(3, kept)
    assert read(made, sent(memory, under_way))[1] == [kept]
    waiting = request(4, 600_013)
    assert not memory.reserve(waiting)
    assert sent(memory, larger) == larger.message(), "it never has room"
    memory.answered(3)
    memory.settled([kept])
    assert read(made, sent(memory, waiting))[1] == waiting.payloads


def test_little_travels_in_its_message(memory: PushMemory) -> None:
    small, large = request(1, MIN_BYTES - 1), request(2, MIN_BYTES)
    assert sent(memory, small) == small.message()
    assert sent(memory, large) != large.message()


def test_what_was_postponed_is_placed_again(made: Made, memory: PushMemory) -> None:
    again = request(1, 700_001)
    sent(memory, again)
    memory.answered(1)
    assert read(made, sent(memory, again))[1] == again.payloads


def place(memory: PushMemory, *sizes: int, pending_bytes: int = 0) -> tuple[bytes, Payload]:
    """What a payload is joined of, and the payload."""
    # Described as the memory of tensors is.
    pieces: list[Any] = [
        os.urandom(7),
        *((ctypes.c_ubyte * size)(*os.urandom(size)) for size in sizes),
    ]
    views = [memoryview(piece) for piece in pieces]
    return b"".join(views), memory.place(views, pending_bytes=pending_bytes)


def holding(sequence: int, *payloads: Payload) -> Request:
    positions = range(len(payloads))
    return Request(sequence, FIELDS, payloads, positions, sum(map(len, payloads)))


def test_what_has_a_place_is_not_copied_again(made: Made, memory: PushMemory) -> None:
    joined, payload = place(memory, 100_003, 70_001)
    assert payload == joined
    assert isinstance(payload, memoryview)
    other = os.urandom(90_007)
    both, again = holding(1, payload, other), holding(2, payload)
    before = memory._free.num_bytes
    message, payloads = read(made, sent(memory, again))
    assert (payloads, memory._free.num_bytes) == ([joined], before)
    message, payloads = read(made, sent(memory, both))
    assert (payloads, before - memory._free.num_bytes) == ([joined, other], 90_048)
    assert message.sequence == 1
    memory.answered(1)
    assert memory._free.num_bytes == before, "what was copied has gone, what has a place stays"
    assert read(made, sent(memory, again))[1] == [joined]
    memory.settled([other, payload, payload])
    assert memory._free.num_bytes == NUM_BYTES // 64 * 64


def test_what_has_no_place_is_joined_elsewhere(memory: PushMemory) -> None:
    for sizes, pending_bytes in (((MIN_BYTES - 8,), 0), ((70_000,), NUM_BYTES - 70_006)):
        joined, payload = place(memory, *sizes, pending_bytes=pending_bytes)
        assert isinstance(payload, bytes)
        assert payload == joined
    _, kept = place(memory, 600_000)
    assert isinstance(place(memory, 600_000)[1], bytes), "there is no room in one piece"
    memory.settled([kept])
    assert isinstance(place(memory, 70_000, pending_bytes=NUM_BYTES - 70_007)[1], memoryview)
    assert isinstance(place(PushMemory(FIELDS, is_wanted=True), 70_000)[1], bytes)


def test_a_place_in_the_memory_of_a_stream_that_broke_is_elsewhere(
    made: Made, memory: PushMemory
) -> None:
    joined, payload = place(memory, 100_003)
    with Made(name=NAME[:-1] + "0") as other:
        following = PushMemory(FIELDS, is_wanted=True)
        assert sent(following, holding(1, payload)) == holding(1, joined).message()
        following.offered(other.offer)
        assert read(other, sent(following, holding(1, payload)))[1] == [joined]
        following.settled([payload])
        following.answered(1)
        assert following._free.num_bytes == NUM_BYTES // 64 * 64


@pytest.mark.parametrize("problem", [PermissionError("not yours"), ValueError("not memory")])
def test_who_may_not_have_the_memory_goes_without(
    made: Made, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def refuse(*_: object, **__: object) -> memoryview:
        raise problem

    monkeypatch.setattr(shared_memory, "attach", refuse)
    memory, each = PushMemory(FIELDS, is_wanted=True), request(1, 700_001)
    memory.offered(made.offer)
    assert sent(memory, each) == each.message()
    assert SampleMemory().offered(made.offer) == []


# --- samples


def put(made: Made, offset: int, frame: pb.SampleFrame, large: sample_bytes.Pieces) -> MemorySpan:
    """Write a response into the memory."""
    data = sample_bytes.frame_response(frame, large)
    made.memory[offset : offset + len(data)] = data
    return MemorySpan(offset=offset, num_bytes=len(data))


def test_parts_of_a_packed_batch_are_released_once_it_is_joined(made: Made) -> None:
    memory, assembler = SampleMemory(), FrameAssembler(PLAN)
    [ready] = memory.offered(made.offer)
    assert ready.HasField("memory_ready")
    parts = [os.urandom(size) for size in (100_003, 7, 50_000)]
    spans, fields = [], None
    for number, part_bytes in enumerate(parts):
        assert fields is None
        frame = pb.SampleFrame(last=number == 2, num_units=3)
        large = sample_bytes.packed_pieces(pb.SampleFrame, [part_bytes])
        spans.append(put(made, 4096 + 200_000 * number, frame, large))
        received, released = memory.read(spans[-1])
        assert released == []
        fields = assembler.add(received, received_time=1.0)
    assert [request.released for request in memory.joined()] == spans
    assert memory.joined() == [], "each once"
    made.memory[:] = bytes(NUM_BYTES)
    assert fields is not None
    joined = fields["columns"]._data
    assert joined == b"".join(parts)
    assert not memoryview(joined).readonly, "a packed batch's tensors are views on it"


@pytest.mark.parametrize("num_bytes", [5_003, 100_003])
def test_payloads_of_a_response_are_copied_one_by_one(made: Made, num_bytes: int) -> None:
    """Small ones by protobuf, others so that tensors can be made on them."""
    memory = SampleMemory()
    memory.offered(made.offer)
    payloads = [
        trxp.encode([Experience(tokens=torch.arange(num_bytes // 4) + run, prompt_length=run)])
        for run in (1, 2, 3)
    ]
    rest = SampledExperience(uid="u", group="g").SerializeToString()
    large = [
        piece for payload in payloads for piece in sample_bytes.experience_pieces(rest, [payload])
    ]
    span = put(made, 0, pb.SampleFrame(last=True, num_units=3), large)
    received, [released] = memory.read(span)
    made.memory[:] = bytes(NUM_BYTES)
    assert released.released == span
    assert list(received.payloads) == payloads
    experiences = LazyPayloads(received.payloads).experiences()
    for run, one in enumerate(experiences, 1):
        assert torch.equal(one.tokens, torch.arange(num_bytes // 4) + run)
        assert one.tokens.data_ptr() % 8 == 0
    if num_bytes > 16_384:
        experiences[0].tokens[0] = -1
        assert received.payloads[0] != payloads[0], "tensors are views on the copies"


@pytest.mark.parametrize("offset", [0, NUM_BYTES - 6, 2**63])
def test_a_response_that_isn_t_there_is_the_servers_error(made: Made, offset: int) -> None:
    memory, span = SampleMemory(), MemorySpan(offset=offset, num_bytes=7)
    with pytest.raises(InternalServerError, match="there is no shared memory"):
        memory.read(span)
    memory.offered(made.offer)
    made.memory[:7] = b"garbage"
    with pytest.raises(InternalServerError, match="says that a batch lies where none is"):
        memory.read(span)
