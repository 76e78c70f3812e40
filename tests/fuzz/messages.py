"""Requests of the service as inputs: a few calls per input, mutated field by field.

An input is a sequence of calls: the method's number (1 byte), the size of the message (2 bytes), the
message. Calls of one stream that follow one another are the messages of one stream.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from experience_buffer._messages import shared_memory
from experience_buffer.v1 import service_pb2, types_pb2
from tests.fuzz import mutations, tables
from tests.fuzz.bombs import many, one

BUFFERS: Final = ("plain", "groups", "replay")
"""Those that there are at first; see `service`."""
MAX_CALLS: Final = 8
_HEAD: Final = struct.Struct("<BH")
_MAX_MESSAGE: Final = 0xFFFF
_MAX_DEPTH: Final = 4


class Method(NamedTuple):
    name: str
    request: type[Message]
    is_stream: bool
    """The client sends a stream of messages."""


METHODS: Final = tuple(
    Method(method.name, GetMessageClass(method.input_type), method.client_streaming)
    for method in service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"].methods
)
_TEXTS: Final = (
    *BUFFERS, *BUFFERS, "trainer", "critic", "1/2", "1/2/3/5/a", "1/2/0/5/a", "1/2/1/5/a",
    "1/2/2/5/a", "1/2/3", "", "\0", "a\0b", "x" * 300, "é" * 400, "../..", "%s%n", "\r\nx: y",
    "0", "1", "-1", "9" * 20, "9" * 30, "max_items", "consumers", "advantage", "name", "group_by",
    "lease_seconds", "grpo", "gae", "rloo", "gamma", "uid", "new",
)  # fmt: skip
_INTEGERS: Final = (
    0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 64, 97, 1000, 4096, 4097, 65_535, 65_536, 65_537, 10**6,
    2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63),
)  # fmt: skip
_FLOATS: Final = (
    0.0, -0.0, 0.5, 1.0, 2.0, 30.0, 1e-300, 5e-324, 1e9, 1e18, 1.7e308, float("inf"),
    float("-inf"), float("nan"), -1.0, -1e-9, 3.5e38, 2.0**63,
)  # fmt: skip
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31),
}


def pack(calls: list[tuple[int, bytes]]) -> bytes:
    return b"".join(_HEAD.pack(number, len(data)) + data for number, data in calls)


def unpack(data: bytes) -> list[tuple[int, bytes]]:
    """The calls of an input; what is cut off is what is there."""
    calls: list[tuple[int, bytes]] = []
    pos = 0
    while pos + _HEAD.size <= len(data) and len(calls) < MAX_CALLS:
        number, size = _HEAD.unpack_from(data, pos)
        pos += _HEAD.size
        calls.append((number % len(METHODS), data[pos : pos + size]))
        pos += size
    return calls


def seeds() -> list[bytes]:
    """Inputs that reach each method in a plausible way."""
    pb = service_pb2
    push = pb.PushRequest(buffer="plain", payload=one(), group_size=2)
    push.tombstones.add(reason="gone").id.batch = "1"
    group = pb.PushRequest(buffer="groups", payload=many(3), group_size=3)
    parts = pb.PushRequest(buffer="plain", payload=one(), payloads=[many(2), b"", one()])
    sample = pb.SampleRequest(buffer="plain", consumer="trainer", batch_size=1)
    ranks = pb.SampleRequest(buffer="groups", consumer="trainer", batch_size=2, min_batch_size=1)
    ranks.rank_of.world_size = 2
    opening = pb.SampleStreamRequest()
    opening.open.CopyFrom(
        pb.SampleStreamOpen(buffer="plain", consumer="trainer", batch_size=1, format=2)  # type: ignore[arg-type]
    )
    settle = pb.SampleStreamRequest(ack=pb.AckLeases(ids=[1, 2], step=3))
    annotation = pb.AnnotateRequest(buffer="plain")
    annotation.annotations.add(uid="1/2/3/5/a", reward=2.0).info.update(
        {"a": [1, "x", {"b": None}]}
    )
    creation = pb.CreateBufferRequest(exist_ok=True)
    creation.config.name = "new"
    creation.config.consumers.add(name="trainer", replay=True).limiter.samples_per_insert = 2
    creation.config.advantage.estimator = "grpo"
    creation.config.advantage.parameters.update({"scale": "std"})
    change = pb.UpdateBufferRequest()
    change.config.name = "plain"
    change.config.max_items = 5
    change.update_mask.paths.append("max_items")
    memory = types_pb2.MemoryRequest(machine=shared_memory.machine())
    span = types_pb2.MemorySpan(offset=4096, num_bytes=4096)
    priority = pb.PriorityUpdate(uid="1/2/3/5/a", priority=2)
    in_order: list[tuple[str, Message]] = [
        ("Push", push), ("Sample", sample), ("Ack", pb.AckRequest(buffer="plain", lease_id=1, step=1)),
        ("Push", group), ("Sample", ranks), ("Nack", pb.NackRequest(buffer="groups", lease_id=1)),
        ("SealGroup", pb.SealGroupRequest(buffer="groups", group="1/2")),
        ("DropGroup", pb.DropGroupRequest(buffer="groups", group="1/2", reason="x")),
        ("PushStream", pb.PushStreamRequest(sequence=1, push=push)),
        ("PushStream", pb.PushStreamRequest(sequence=2, push=group)),
        ("PushStream", pb.PushStreamRequest(sequence=3, push=parts)),
        ("PushStream", pb.PushStreamRequest(sequence=4, push=push, memory=memory)),
        ("PushStream", pb.PushStreamRequest(sequence=5, push=push, spans=[span])),
        ("SampleStream", pb.SampleStreamRequest(memory_ready=pb.MemoryReady())),
        ("SampleStream", pb.SampleStreamRequest(released=span)),
        ("SampleStream", opening), ("SampleStream", pb.SampleStreamRequest(credits=2)),
        ("SampleStream", settle),
        ("SampleStream", pb.SampleStreamRequest(extend=pb.ExtendLeaseRequest(lease_id=1))),
        ("SampleStream", pb.SampleStreamRequest(nack=pb.NackLeases(ids=[1], reason="x"))),
        ("ExtendLease", pb.ExtendLeaseRequest(buffer="plain", lease_id=1, lease_seconds=5)),
        ("Rewind", pb.RewindRequest(buffer="plain", consumer="trainer", step=-1)),
        ("DeclareSafe", pb.DeclareSafeRequest(buffer="plain", consumer="trainer", step=1)),
        ("ReleaseQuarantined", pb.ReleaseQuarantinedRequest(buffer="plain", consumer="trainer")),
        ("UpdatePriorities", pb.UpdatePrioritiesRequest(buffer="plain", updates=[priority])),
        ("Get", pb.GetRequest(buffer="plain", uid="1/2/3/5/a")),
        ("List", pb.ListRequest(buffer="plain", page_size=1, page_token="1")),
        ("Scan", pb.ScanRequest(buffer="plain", cursor="1.1", without_payloads=True)),
        ("Scan", pb.ScanRequest(buffer="plain")),
        ("Annotate", annotation),
        ("Delete", pb.DeleteRequest(buffer="plain", uids=["1/2/3/5/a"])),
        ("CreateBuffer", creation), ("UpdateBuffer", change),
        ("GetBuffer", pb.GetBufferRequest(name="plain")),
        ("ListBuffers", pb.ListBuffersRequest()),
        ("DeleteBuffer", pb.DeleteBufferRequest(name="new", force=True)),
        ("PublishPolicyVersion", pb.PublishPolicyVersionRequest(buffer="plain", version=3)),
        ("WatchPolicyVersion", pb.WatchPolicyVersionRequest(buffer="plain")),
        ("ReserveGroups", pb.ReserveGroupsRequest(buffer="groups", groups=["1/7"])),
        ("GetStats", pb.GetStatsRequest()),
    ]  # fmt: skip
    numbers = {method.name: number for number, method in enumerate(METHODS)}
    calls = [(numbers[name], message.SerializeToString()) for name, message in in_order]
    named = {name for name, _ in in_order}
    calls += [(number, b"") for name, number in numbers.items() if name not in named]
    windows = [calls[start : start + 3] for start in range(0, len(calls), 2)]
    return [pack([call]) for call in calls] + [pack([calls[0], *window]) for window in windows]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a call, or which calls there are."""
    calls = unpack(data)
    choice = rng.random()
    if calls and choice < 0.7:
        at = rng.randrange(len(calls))
        number, message = calls[at]
        calls[at] = (number, _mutated(number, message, rng))
    elif calls and choice < 0.78:
        del calls[rng.randrange(len(calls))]
    elif calls and choice < 0.84:
        calls.insert(rng.randrange(len(calls) + 1), rng.choice(calls))
    else:
        calls.insert(rng.randrange(len(calls) + 1), rng.choice(_plausible()))
    return pack([(number, message[:_MAX_MESSAGE]) for number, message in calls[:MAX_CALLS]])


@lru_cache
def _plausible() -> tuple[tuple[int, bytes], ...]:
    return tuple(call for seed in seeds() for call in unpack(seed)[:1])


def _mutated(number: int, data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return mutations.of_bytes(data, rng)
    message = METHODS[number].request()
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.Clear()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change(message, rng)
    try:
        return message.SerializeToString()
    except EncodeError:
        return data


def mutate_annotation(data: bytes, rng: random.Random) -> bytes:
    """Change an annotation: its fields, or the tensors in it."""
    if rng.random() < 0.1:
        return mutations.of_bytes(data, rng)
    message = service_pb2.Annotation()
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.uid = "x"
    if message.tensors and rng.random() < 0.5:
        message.tensors = tables.mutate(message.tensors, rng)
    else:
        change(message, rng)
    return message.SerializeToString()


def change(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Change one field of a message, or of a message in it."""
    described: Any = message.DESCRIPTOR
    fields: list[FieldDescriptor] = list(described.fields)
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.08:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(getattr(message, field.name), field, rng, depth)
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, rng, depth)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < _MAX_DEPTH:
            change(inner, rng, depth + 1)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _change_map(entries: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    key = rng.choice((*entries, *_TEXTS))
    inner = entries[key]
    if depth < _MAX_DEPTH:
        change(inner, rng, depth + 1)


def _change_list(values: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    if len(values) and rng.random() < 0.2:
        del values[rng.randrange(len(values)) :]
        return
    for _ in range(rng.choice((1, 1, 1, 2, 70))):
        if field.message_type is None:
            values.append(_value(field, "" if field.cpp_type == field.CPPTYPE_STRING else 0, rng))
        elif len(values) and rng.random() < 0.5:
            change(rng.choice(values), rng, depth + 1)
        else:
            added = values.add()
            if depth < _MAX_DEPTH:
                change(added, rng, depth + 1)


def _value(field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return _bytes(old, rng)
        return rng.choice(_TEXTS)
    if field.enum_type is not None and rng.random() < 0.8:
        return rng.choice(field.enum_type.values).number
    low, high = _RANGES[kind]
    return rng.choice([value for value in _INTEGERS if low <= value < high])


def _bytes(old: bytes, rng: random.Random) -> bytes:
    mutation: Callable[[bytes, random.Random], bytes] = rng.choice(
        (mutations.of_frame, mutations.of_frame, mutations.of_bytes)
    )
    fresh = (one(), many(2), many(4, {"task": rng.randrange(9)}), one(reward=None))
    return mutation(old, rng) if old and rng.random() < 0.6 else rng.choice(fresh)
