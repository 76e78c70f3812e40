"""Memory that clients share with a server on their machine: the same bytes, by a shorter way.

Whatever a client says of it, true or not, costs its own stream at most.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from experience_buffer import (
    EID,
    BufferConfig,
    Client,
    ClientOptions,
    ConsumerConfig,
    DeadlineExceededError,
    Experience,
    WriterOptions,
    trxp,
)
from experience_buffer._messages import shared_memory
from experience_buffer._messages.shared_memory import PUSH_BYTES
from experience_buffer._transport.push_queue import Request
from experience_buffer.consumer_options import SampleFormat
from experience_buffer.v1 import service_pb2, types_pb2
from tests.integration.buffers import create
from tests.integration.plain import error_of
from tests.integration.server import MakeServer, Server, Stub, eventually
from tests.integration.streams import Spoken, SpokenStream, ending, speaking

HERE = types_pb2.MemoryRequest(machine=shared_memory.machine())
OVER_GRPC = ClientOptions(shared_memory=False)
GROUP_SIZE, NUM_GROUPS = 3, 11
FORMATS: tuple[SampleFormat, ...] = ("packed", "trxp")


def member(task: int, run: int, num_tokens: int = 7_001) -> Experience:
    """One of about 60 KB, with what it holds made of its identity."""
    return Experience(
        eid=EID(0, task, run, suffix="5ba0c2"),
        tokens=torch.arange(num_tokens, dtype=torch.int32) * (task + 3) + run,
        logprobs=-torch.arange(num_tokens - 11, dtype=torch.float32) / (1 + task + run),
        action_mask=torch.arange(num_tokens - 11) % (run + 2) == 0,
        reward=float(run),
        prompt_length=11,
        response_text="é" * 101,
    )


GROUPS = [[member(task, run) for run in range(GROUP_SIZE)] for task in range(NUM_GROUPS)]
PAYLOADS = {one.eid.uid: trxp.encode([one]) for group in GROUPS for one in group}


def config(name: str) -> BufferConfig:
    """A buffer whose consumers are named by the formats, and by whether memory is shared."""
    consumers = [ConsumerConfig(name, unit="group") for name in (*FORMATS, "packed2", "trxp2")]
    return BufferConfig(name, group_size=GROUP_SIZE, consumers=tuple(consumers))


def figures(server: Server, prefix: str = "experience_buffer_shared_memory") -> dict[str, float]:
    """What the server says of its shared memory."""
    lines = server.metrics().splitlines()
    named = [line.removeprefix(prefix).rpartition(" ") for line in lines if line.startswith(prefix)]
    return {name: float(value) for name, _, value in named}


def shared_streams(server: Server) -> float:
    """How many streams have got any so far."""
    return figures(server).get('_streams_total{result="shared"}', 0.0)


@pytest.fixture
def either(shared_server: Server, connect: Any) -> Iterator[Client]:
    """A client of either kind."""
    with connect(shared_server.address) as connected:
        yield connected


def written(client: Client, name: str) -> None:
    """All groups, through a background writer that has shared memory."""
    with client.writer(buffer=name) as writer:
        writer.append(GROUPS[0])
        eventually(lambda: writer._memory._memory is not None, "shared memory")
        for group in GROUPS[1:]:
            writer.append(group)
        writer.flush()
        assert writer.counts.num_stored == len(PAYLOADS)
        # What was answered leaves its room.
        assert writer._memory._free.num_bytes == len(writer._memory._memory or b"")


def sampled(client: Client, name: str, consumer: str) -> dict[str, bytes]:
    """All that a consumer gets by a stream, as payloads; groups are whole."""
    found: dict[str, bytes] = {}
    format: SampleFormat = "packed" if consumer.startswith("packed") else "trxp"
    with client.stream(
        3, buffer=name, consumer=consumer, format=format, timeout=0.2, min_batch_size=1
    ) as stream:
        while len(found) < len(PAYLOADS):
            batch = next(stream)
            experiences = batch.experiences
            assert len({one.eid.tid for one in experiences}) * GROUP_SIZE == len(experiences)
            found |= {one.eid.uid: trxp.encode([one]) for one in experiences}
            batch.ack()
            assert (stream._memory._memory is not None) is client.options.shared_memory
    assert stream._memory._memory is None, "a closed stream keeps none"
    return found


# --- the same bytes


def test_what_goes_through_shared_memory_is_what_goes_over_grpc(
    shared_server: Server, either: Client, name: str
) -> None:
    either.create_buffer(config(name))
    before = shared_streams(shared_server)
    written(either, name)
    with Client(shared_server.address, options=OVER_GRPC) as other:
        for consumer in FORMATS:
            assert sampled(either, name, consumer) == PAYLOADS
        assert shared_streams(shared_server) == before + 3
        for again in ("packed2", "trxp2"):
            assert sampled(other, name, again) == PAYLOADS
        assert shared_streams(shared_server) == before + 3


LARGER = [member(task, 0, 1_000_003) for task in range(10)]
"""Of 9 MB: a batch of five has more than a stream's memory holds."""


def larger(client: Client, name: str) -> None:
    """A buffer of these, and two consumers."""
    consumers = [ConsumerConfig(name) for name in FORMATS]
    client.create_buffer(BufferConfig(name, group_by="none", consumers=tuple(consumers)))
    client.push(LARGER, buffer=name)


@pytest.mark.parametrize("options", [None, OVER_GRPC], ids=["shared", "grpc"])
def test_a_batch_larger_than_the_memory_lies_there_as_far_as_it_has_room(
    shared_server: Server, name: str, options: ClientOptions | None, connect: Any
) -> None:
    with connect(shared_server.address, options=options) as client:
        larger(client, name)
        with client.stream(5, buffer=name, consumer="packed", format="packed") as stream:
            batches = [next(stream) for _ in range(2)]
        tokens = [batch.packed.tensor("tokens") for batch in batches]
        tokens[0].zero_()  # They are the trainer's own.
    assert torch.equal(tokens[1], torch.cat([one.tokens for one in LARGER[5:]]))
    for batch, expected in zip(batches, (LARGER[:5], LARGER[5:]), strict=True):
        logprobs = [one.logprobs for one in expected if one.logprobs is not None]
        assert torch.equal(batch.packed.tensor("logprobs"), torch.cat(logprobs))


def test_parts_of_a_batch_have_room_again_once_it_is_whole(
    client: Client, stub: Stub, name: str
) -> None:
    larger(client, name)
    kinds: list[list[str]] = [[], []]
    with speaking(stub) as stream:
        opened(stream, name, num_packed=5)
        for told in kinds:
            stream.say(credits=1)
            spans: list[types_pb2.MemorySpan] = []
            is_last = False
            while not is_last:
                message = stream.next()
                told.append(str(message.WhichOneof("message")))
                if told[-1] == "span":
                    spans.append(message.span)
                is_last = told[-1] == "frame" and message.frame.last
            for span in spans:
                stream.say(released=span)
    # 45 MB in parts of 1: 31 of them have room, and as many again.
    assert kinds[0] == kinds[1]
    assert kinds[0].count("span") > 25
    assert kinds[0].count("frame") > 10


LINGERING = WriterOptions(linger_seconds=60, max_pending_bytes=250_000)
"""One group waits until it is flushed; a second one has no room."""


def test_what_waits_lies_in_the_memory_already(
    shared_server: Server, either: Client, name: str
) -> None:
    either.create_buffer(config(name))
    with either.writer(buffer=name, options=LINGERING) as writer:
        writer.append(GROUPS[0][0])
        writer.flush()
        memory = writer._memory
        eventually(lambda: memory._memory is not None, "shared memory")
        whole = memory._free.num_bytes
        writer.append(GROUPS[1])
        taken = whole - memory._free.num_bytes
        assert taken >= len(trxp.encode(GROUPS[1]))
        with pytest.raises(DeadlineExceededError, match="0 of 3 experiences were queued"):
            writer.append(GROUPS[2], timeout=0.05)
        assert whole - memory._free.num_bytes == taken, "what wasn't queued has left its place"
        writer.flush()
        assert memory._free.num_bytes == whole
    for one in GROUPS[1]:
        assert either.get(one.eid.uid, buffer=name).payload == PAYLOADS[one.eid.uid]


MANY_LARGE = [member(task, 0, 350_003) for task in range(14)]
"""Three megabytes each: more than the memory holds, less than may wait."""


@pytest.fixture
def by_message(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of large requests that didn't go through shared memory, as they are sent."""
    found: list[int] = []
    real = Request.message

    def note(request: Request) -> bytes:
        if request.num_bytes >= shared_memory.MIN_BYTES:
            found.append(request.num_bytes)
        return real(request)

    monkeypatch.setattr(Request, "message", note)
    return found


def test_more_than_the_memory_holds_waits_for_room_there(
    shared_server: Server, either: Client, name: str, by_message: list[int]
) -> None:
    create(either, name)
    with either.writer(buffer=name) as writer:
        writer.append(member(99, 0, 20))
        eventually(lambda: writer._memory._memory is not None, "shared memory")
        writer.append(MANY_LARGE[:5])
        for one in MANY_LARGE[5:]:
            writer.append(one)
        writer.flush()
        assert writer.counts.num_stored == 1 + len(MANY_LARGE)
    assert by_message == []
    for one in MANY_LARGE:
        assert either.get(one.eid.uid, buffer=name).payload == trxp.encode([one])


def test_larger_than_the_memory_goes_over_grpc(
    shared_server: Server, client: Client, name: str
) -> None:
    """In one stream with what fits, both ways."""
    client.create_buffer(
        BufferConfig(name, group_by="none", consumers=(ConsumerConfig("t"), ConsumerConfig("p")))
    )
    sizes = [7_001, 2_000_003, 7_013, 4_500_017, 7_019]
    experiences = [member(task, 0, size) for task, size in enumerate(sizes)]
    with client.writer(buffer=name, options=WriterOptions(max_batch_items=1)) as writer:
        for experience in experiences:
            writer.append(experience)
            writer.flush()
    for consumer, format in zip("pt", FORMATS, strict=True):
        with client.stream(1, buffer=name, consumer=consumer, format=format) as stream:
            for experience in experiences:
                [found] = next(stream).experiences
                assert trxp.encode([found]) == trxp.encode([experience])


# --- who has none


def test_a_server_that_shares_none(make_server: MakeServer, name: str) -> None:
    server = make_server(toml="[server]\nmax_shared_bytes = 0\n")
    with Client(server.address) as client:
        client.create_buffer(config(name))
        with client.writer(buffer=name) as writer:
            writer.append([one for group in GROUPS for one in group])
        with client.stream(NUM_GROUPS, buffer=name, consumer="trxp") as stream:
            assert len(next(stream).experiences) == len(PAYLOADS)
        found = figures(server)
        assert found['_streams_total{result="max_shared_bytes"}'] == 2
        assert found['_streams_total{result="shared"}'] == found["_bytes"] == 0


# --- what is left of it


def memory_files(server: Server) -> list[str]:
    """Shared memory that a server has open or mapped."""
    folder = f"/proc/{server.pid}/fd"
    found = []
    for number in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{number}"))
        except FileNotFoundError:
            continue  # Closed meanwhile.
    with open(f"/proc/{server.pid}/maps") as maps:
        found += [line for line in maps if shared_memory.NAME_PREFIX in line]
    return [path for path in found if shared_memory.NAME_PREFIX in path]


def test_it_goes_with_its_stream(make_server: MakeServer, name: str) -> None:
    server = make_server()
    with Client(server.address) as client:
        client.create_buffer(config(name))
        for _ in range(3):
            written_once = client.writer(buffer=name)
            written_once.append([one for group in GROUPS for one in group])
            written_once.flush()
            with client.stream(1, buffer=name, consumer="packed", format="packed") as stream:
                next(stream)
                assert figures(server)["_bytes"] > 0
                assert memory_files(server)
            written_once.close()
            eventually(lambda: figures(server)["_bytes"] == 0, "the end of both streams")
        eventually(lambda: not memory_files(server), "nothing of it to be left")


def test_a_server_that_comes_back_shares_memory_again(make_server: MakeServer, name: str) -> None:
    """What was under way in the memory of the dead one is pushed again, and is stored once."""
    server = make_server()
    with Client(server.address) as client:
        client.create_buffer(config(name))
        with client.writer(buffer=name) as writer:
            for place, group in enumerate(GROUPS):
                writer.append(group)
                if place in (3, 7):
                    server.restart()
            writer.flush()
            assert writer.counts.num_stored + writer.counts.num_duplicates == len(PAYLOADS)
            writer.append(member(99, 0))
            eventually(lambda: writer._memory._memory is not None, "memory of the new server")
        for consumer in FORMATS:
            assert sampled(client, name, consumer) == PAYLOADS


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_ends_while_a_request_waits_for_room(
    make_server: MakeServer, name: str, is_closed: bool
) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, name)
        writer = client.writer(buffer=name)
        writer.append(member(99, 0, 20))
        eventually(lambda: writer._memory._memory is not None, "shared memory")
        server.signal(signal.SIGSTOP)
        for one in MANY_LARGE:
            writer.append(one)
        eventually(lambda: writer._is_short, "a request that waits")
        if is_closed:
            with pytest.raises(DeadlineExceededError):
                writer.close(timeout=0.1)
            server.signal(signal.SIGCONT)
            return
        server.restart()
        writer.close()
        assert writer.counts.num_stored + writer.counts.num_duplicates == 1 + len(MANY_LARGE)


# --- whatever a client says


class SpokenPushes(Spoken):
    """A PushStream by hand, with the memory that it has got."""

    def __init__(self, stub: Stub, name: str) -> None:
        super().__init__(stub.PushStream)
        self._name = name
        self.memory: mmap.mmap | None = None

    def say(self, sequence: int, **fields: Any) -> None:
        """Send one message."""
        push = {"push": service_pb2.PushRequest(buffer=self._name)} | fields
        self.send(service_pb2.PushStreamRequest(sequence=sequence, **push))

    def share(self) -> None:
        """Ask for memory, and map it."""
        self.say(1, memory=HERE)
        answer = next(self.call)
        assert (answer.sequence, answer.WhichOneof("result")) == (1, "memory")
        path = f"/proc/{answer.memory.process_id}/fd/{answer.memory.descriptor}"
        descriptor = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, answer.memory.num_bytes)
        os.close(descriptor)

    def put(self, payload: bytes, offset: int) -> types_pb2.MemorySpan:
        """Write a payload into the memory."""
        assert self.memory is not None
        self.memory[offset : offset + len(payload)] = payload
        return types_pb2.MemorySpan(offset=offset, num_bytes=len(payload))

    def outcome(self, sequence: int) -> str:
        """What became of a push: the statuses of its items, or what was wrong with all of it."""
        answer = next(self.call)
        assert answer.sequence == sequence
        if answer.WhichOneof("result") == "error":
            return str(answer.error.message)
        return ",".join(
            types_pb2.PushStatus.Name(one.status).removeprefix("PUSH_STATUS_")
            for one in answer.response.outcomes
        )


def pushing(stub: Stub, name: str) -> AbstractContextManager[SpokenPushes]:
    """A push stream that is cancelled in the end."""
    return ending(SpokenPushes(stub, name))


def test_payloads_in_memory_and_in_the_message_belong_together(
    client: Client, stub: Stub, name: str
) -> None:
    client.create_buffer(config(name))
    payloads = [trxp.encode([one]) for one in GROUPS[0]]
    with pushing(stub, name) as stream:
        stream.share()
        spans = [stream.put(payloads[1], 100_001), stream.put(payloads[2], 3)]
        push = service_pb2.PushRequest(buffer=name, payload=payloads[0])
        stream.say(2, push=push, spans=spans)
        assert stream.outcome(2) == "STORED,STORED,STORED"
        stream.say(3, push=push, spans=spans)
        assert stream.outcome(3) == "DUPLICATE,DUPLICATE,DUPLICATE"
        # What lies there is written over: others are known by their own bytes.
        stream.say(4, spans=[stream.put(trxp.encode([GROUPS[1][0]]), 3)])
        assert stream.outcome(4) == "STORED"
    for one in GROUPS[0]:
        assert client.get(one.eid.uid, buffer=name).payload == PAYLOADS[one.eid.uid]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([{"offset": 2**64 - 1, "num_bytes": 7}], f"don't lie in shared memory of {PUSH_BYTES}"),
        ([{"offset": 0, "num_bytes": PUSH_BYTES}] * 3, "over the limit: server.max_message_bytes"),
        ([{"offset": 4096, "num_bytes": 100}], "TRXP"),
    ],
)
def test_payloads_that_aren_t_there_are_refused_and_the_stream_goes_on(
    client: Client, stub: Stub, name: str, spans: list[Mapping[str, int]], words: str
) -> None:
    client.create_buffer(config(name))
    with pushing(stub, name) as stream:
        stream.share()
        stream.say(2, spans=[types_pb2.MemorySpan(**span) for span in spans])
        assert words in stream.outcome(2)
        stream.say(3, spans=[stream.put(trxp.encode([GROUPS[0][0]]), 0)])
        assert stream.outcome(3) == "STORED"


def opened(
    stream: SpokenStream, name: str, *, ready: bool = True, num_packed: int = 0
) -> types_pb2.SharedMemory:
    """A sample stream with memory: of payloads, or of packed batches of so many."""
    asked: dict[str, Any] = {"consumer": "trxp", "memory": HERE}
    if num_packed:
        asked |= {"consumer": "packed", "format": types_pb2.SAMPLE_FORMAT_PACKED}
    stream.open(name, num_packed or 1, **asked)
    offer = stream.next()
    assert offer.WhichOneof("message") == "memory", offer
    if ready:
        stream.say(memory_ready=service_pb2.MemoryReady())
    return offer.memory


def test_memory_is_asked_for_once_and_payloads_need_it(
    client: Client, stub: Stub, name: str
) -> None:
    client.create_buffer(config(name))
    with pushing(stub, name) as stream:
        stream.say(1, memory=types_pb2.MemoryRequest(machine="another/4026531836"))
        stream.say(2, spans=[types_pb2.MemorySpan(offset=0, num_bytes=100)])
        assert "the stream has no shared memory" in stream.outcome(2)
    with pushing(stub, name) as stream:
        stream.share()
        stream.say(2, memory=HERE)
        code, text, _ = error_of(lambda: next(stream.call))
    assert (code, "ask once" in text) == ("INVALID_ARGUMENT", True)


def test_nothing_is_put_into_memory_that_the_client_hasn_t_got(
    client: Client, stub: Stub, name: str
) -> None:
    client.create_buffer(config(name))
    written(client, name)
    with speaking(stub) as stream:
        opened(stream, name, ready=False)
        stream.say(credits=1)
        assert len(stream.batch().experiences) == GROUP_SIZE
        stream.say(memory_ready=service_pb2.MemoryReady())
        stream.say(credits=1)
        assert stream.next().WhichOneof("message") == "span"


def test_a_reader_that_releases_nothing_gets_the_rest_over_grpc(
    client: Client, stub: Stub, name: str
) -> None:
    client.create_buffer(BufferConfig(name, group_by="none", consumers=(ConsumerConfig("trxp"),)))
    client.push([member(task, 0, 1_000_003) for task in range(6)], buffer=name)
    kinds: list[str] = []
    with speaking(stub) as stream:
        opened(stream, name)
        stream.say(credits=6)
        while kinds.count("span") + kinds.count("last") < 6:
            message = stream.next()
            kind = message.WhichOneof("message")
            kinds.append("last" if kind == "frame" and message.frame.last else str(kind))
    # 9 MB each: three of them have room.
    assert kinds.count("span") == 3


@pytest.mark.parametrize(
    ("message", "has_memory", "words"),
    [
        ({"released": types_pb2.MemorySpan(offset=0, num_bytes=1)}, True, "release each once"),
        ({"released": types_pb2.MemorySpan()}, False, "unexpected message 'released'"),
        ({"memory_ready": service_pb2.MemoryReady()}, False, "unexpected message 'memory_ready'"),
    ],
)
def test_what_a_reader_has_not_got_it_has_nothing_to_say_of(
    client: Client, stub: Stub, name: str, message: dict[str, Any], has_memory: bool, words: str
) -> None:
    client.create_buffer(config(name))
    with speaking(stub) as stream:
        if has_memory:
            opened(stream, name)
        else:
            stream.open(name, 1, consumer="trxp")
        stream.say(**message)
        code, text, _ = error_of(stream.next)
    assert (code, words in text) == ("INVALID_ARGUMENT", True), text
