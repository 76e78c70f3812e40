"""This project: through the client library, or the generated stubs alone."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import experiences
from benchmarks.compare.adapters import plain
from benchmarks.servers import running_server
from benchmarks.workload import Received, Rollout, Size
from experience_buffer import (
    Batch,
    BufferConfig,
    Client,
    ClientOptions,
    ConsumerConfig,
    Experience,
    WriterOptions,
    trxp,
)
from experience_buffer._sync.batch import PendingAck
from experience_buffer.consumer_options import SampleFormat
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, service_pb2_grpc, types_pb2

_BUFFER = "bench"
_TIMEOUT_SECONDS = 60.0
_PENDING_BYTES = 8 * 2**20
"""An eighth of the default, so that the queue is full when a window of time begins."""
_PENDING_ITEMS = 8
"""At least; of images one alone exceeds the bytes."""

_PREFETCH = 3
"""Batches under way, as many as Reverb's reader has; and as many acks."""


@contextmanager
def serve(folder: Path, size: Size, variant: str) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Run a server with one buffer, whose acks follow the fsync."""
    del variant
    with running_server(folder / "data") as server:
        with Client(server.address) as client:
            consumer = ConsumerConfig(name="trainer", unit="group")
            client.create_buffer(
                BufferConfig(name=_BUFFER, group_size=size.group_size, consumers=(consumer,))
            )
        yield server.address, server.processes()


def writer(address: str, size: Size, writer: int, mode: str) -> PushWriter:
    """Connect a writer: `push`, a call per group; `writer`, in the background; `stubs`.

    With `-grpc` behind that it shares no memory with the server.
    """
    torch.set_num_threads(1)
    kind, options = _options(mode)
    kinds = {"push": PushWriter, "writer": BackgroundWriter, "stubs": StubWriter}
    return kinds[kind](address, size, writer, options)


def reader(address: str, size: Size, mode: str) -> StreamReader:
    """Connect a reader: `trxp`, as experiences, or `packed`, as columns; `-grpc` as in `writer`."""
    torch.set_num_threads(1)
    kind, options = _options(mode)
    return StreamReader(address, size, "packed" if kind == "packed" else "trxp", options)


def _options(mode: str) -> tuple[str, ClientOptions]:
    """A mode without what it says of shared memory, and that."""
    kind = mode.removesuffix("-grpc")
    return kind, ClientOptions(shared_memory=kind == mode)


def leave() -> None:
    """Nothing: each writer and reader has its own connection."""


def versions() -> Mapping[str, str]:
    """Of the packages that count."""
    names = ("grpcio", "protobuf", "lmdb", "torch")
    return {name: plain(importlib.metadata.version(name)) for name in names}


class PushWriter:
    """`Client.push`, which returns when the group is durable."""

    def __init__(self, address: str, size: Size, writer: int, options: ClientOptions) -> None:
        self._size = size
        self._groups = experiences.Groups(size, writer)
        self._client = Client(address, timeout=_TIMEOUT_SECONDS, options=options)
        self._client.get_buffer(_BUFFER)
        self._num_pushed = 0

    @property
    def num_acked(self) -> int:
        """Experiences that are durable."""
        return self._num_pushed

    def push(self, number: int) -> None:
        """Push one group."""
        group = self._groups.named(number)
        self._send(group)
        self._num_pushed += len(group)

    def push_one(self, number: int) -> None:
        """Push one experience."""
        group, run = divmod(number, self._size.group_size)
        self._send(self._groups.named(group)[run : run + 1])

    def flush(self) -> None:
        """Nothing: every push was waited for."""

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _send(self, group: Sequence[Experience]) -> None:
        self._client.push(group, buffer=_BUFFER)


class BackgroundWriter(PushWriter):
    """The client's background writer; what counts is what has its durable ack."""

    def __init__(self, address: str, size: Size, writer: int, options: ClientOptions) -> None:
        super().__init__(address, size, writer, options)
        pending = max(_PENDING_BYTES, _PENDING_ITEMS * size.num_bytes)
        bounds = WriterOptions(max_pending_bytes=pending)
        self._background = self._client.writer(buffer=_BUFFER, options=bounds)

    @property
    def num_acked(self) -> int:
        """Experiences that are durable."""
        return self._background.counts.num_stored

    def push(self, number: int) -> None:
        """Append one group."""
        self._background.append(self._groups.named(number))

    def flush(self) -> None:
        """Wait until everything is durable."""
        self._background.flush()

    def close(self) -> None:
        """Disconnect."""
        self._background.close()
        super().close()


class StubWriter(PushWriter):
    """The generated stubs: what another language's client would do."""

    def __init__(self, address: str, size: Size, writer: int, options: ClientOptions) -> None:
        super().__init__(address, size, writer, options)
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1)]
        )
        self._stub = service_pb2_grpc.ExperienceBufferStub(self._channel)

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()
        super().close()

    def _send(self, group: Sequence[Experience]) -> None:
        request = service_pb2.PushRequest(buffer=_BUFFER, payload=trxp.encode(group))
        response = self._stub.Push(request, timeout=_TIMEOUT_SECONDS)
        for outcome in response.outcomes:
            if outcome.status != types_pb2.PUSH_STATUS_STORED:
                raise RuntimeError(f"{outcome.uid} wasn't stored: {outcome.message}")


@dataclass(frozen=True, slots=True)
class Columns:
    """What a trainer takes of a packed batch: views, shapes [N] and [B + 1]."""

    packed: PackedBatch
    tokens: torch.Tensor
    token_offsets: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor
    response_offsets: torch.Tensor
    rewards: torch.Tensor


class StreamReader:
    """`Client.stream`: every batch is acknowledged, and that is durable too."""

    def __init__(
        self, address: str, size: Size, format: SampleFormat, options: ClientOptions
    ) -> None:
        self._size = size
        self._format: SampleFormat = format
        self._pending: deque[PendingAck] = deque()
        self._client = Client(address, timeout=_TIMEOUT_SECONDS, options=options)
        self._stream = self._client.stream(
            size.batch_groups,
            buffer=_BUFFER,
            consumer="trainer",
            prefetch=_PREFETCH,
            format=format,
        )

    @property
    def keeps_groups(self) -> bool:
        """Whether its batches are whole groups."""
        return True

    def sample(self) -> list[Experience] | Columns:
        """Take the next batch of the stream and acknowledge it, with few acks under way."""
        batch = next(self._stream)
        arrays = self._arrays(batch)
        if len(self._pending) == _PREFETCH:
            self._pending.popleft().result()
        self._pending.append(batch.begin_ack())
        return arrays

    def fetch(self) -> tuple[Batch, list[Experience] | Columns]:
        """Sample one batch by a unary call."""
        batch = self._client.sample(
            self._size.batch_groups, buffer=_BUFFER, consumer="trainer", format=self._format
        )
        return batch, self._arrays(batch)

    def settle(self, batch: Any) -> None:
        """Acknowledge what was fetched."""
        if isinstance(batch, tuple):
            batch[0].ack()

    def unpack(self, batch: Any) -> Sequence[Received]:
        """The batch's experiences, to be checked."""
        if isinstance(batch, tuple):
            return self.unpack(batch[1])
        if isinstance(batch, Columns):
            return [_row(batch, index) for index in range(len(batch.packed))]
        return [experiences.received(experience) for experience in batch]

    def close(self) -> None:
        """Give back what was read ahead, and disconnect."""
        while self._pending:
            self._pending.popleft().result()
        self._stream.close()
        self._client.close()

    def _arrays(self, batch: Batch) -> list[Experience] | Columns:
        if self._format == "trxp":
            return batch.experiences
        packed = batch.packed
        return Columns(
            packed=packed,
            tokens=packed.tensor("tokens"),
            token_offsets=packed.offsets("tokens"),
            logprobs=packed.tensor("logprobs"),
            mask=packed.tensor("action_mask"),
            response_offsets=packed.offsets("logprobs"),
            rewards=packed.column("reward"),
        )


def _row(columns: Columns, index: int) -> Received:
    """One experience: its arrays from the columns, all else from its metadata."""
    begin, end = columns.token_offsets[index : index + 2].tolist()
    first, last = columns.response_offsets[index : index + 2].tolist()
    whole = experiences.received(columns.packed.of(index))
    rollout = Rollout(
        tokens=columns.tokens[begin:end].numpy(),
        logprobs=columns.logprobs[first:last].numpy(),
        mask=columns.mask[first:last].numpy(),
        reward=float(columns.rewards[index]),
        metadata=whole.rollout.metadata,
        text=whole.rollout.text,
        image=whole.rollout.image,
    )
    return Received(whole.writer, whole.number, whole.run, rollout)
