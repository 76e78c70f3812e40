"""From leased units to what travels: payloads with their computed advantages in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experience_buffer import errors, trxp
from experience_buffer.v1 import types_pb2
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.base import AdvantageRow, Store

FRAME_BYTES = 1024 * 1024
"""Size at which a part of a streamed batch is sent."""


def read_payloads(store: Store, buffer: Buffer, entries: Sequence[Entry]) -> list[bytes]:
    """The TRXP payloads of stored experiences, advantages and returns in place.

    Raises:
        DataLossError: A payload is gone or damaged; the message names its uid.
    """
    payloads = store.payloads(buffer.id, [entry.record.uid for entry in entries])
    computed = store.advantages(buffer.id, [entry.record.seq for entry in entries])
    result = []
    for entry, payload, row in zip(entries, payloads, computed, strict=True):
        if payload is None:
            raise errors.DataLossError(
                f"the payload of {entry.record.uid!r} in buffer {buffer.name!r} is gone; "
                "delete the experience",
                subject=entry.record.uid,
            )
        result.append(payload if row is None else _with_advantages(payload, row))
    return result


def sampled(
    store: Store, buffer: Buffer, lease: Lease
) -> Iterator[list[types_pb2.SampledExperience]]:
    """The experiences of a lease, unit by unit.

    Raises:
        DataLossError: A payload is gone or damaged.
    """
    for unit in list(lease.units):
        entries = buffer.contents.by_seqs(unit.seqs)
        payloads = read_payloads(store, buffer, entries)
        yield [
            types_pb2.SampledExperience(
                uid=entry.record.uid,
                group="" if entry.group is None else entry.group.row.key,
                payload=payload,
                num_deliveries=unit.num_deliveries,
                staleness=buffer.staleness(entry),
            )
            for entry, payload in zip(entries, payloads, strict=True)
        ]


def frames(
    store: Store, buffer: Buffer, lease: Lease
) -> Iterator[list[types_pb2.SampledExperience]]:
    """The experiences of a lease in parts of about `FRAME_BYTES`.

    Raises:
        DataLossError: A payload is gone or damaged.
    """
    part: list[types_pb2.SampledExperience] = []
    num_bytes = 0
    for experiences in sampled(store, buffer, lease):
        for experience in experiences:
            if part and num_bytes + len(experience.payload) > FRAME_BYTES:
                yield part
                part, num_bytes = [], 0
            part.append(experience)
            num_bytes += len(experience.payload)
    yield part


def _with_advantages(payload: bytes, row: AdvantageRow) -> bytes:
    return trxp.with_tensors(
        payload, {"advantages": _column(row.advantages), "returns": _column(row.returns)}
    )


def _column(data: bytes) -> trxp.TensorView:
    return trxp.TensorView("F32", (len(data) // 4,), memoryview(data))
