"""From leased units to what travels: payloads with their computed advantages in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experience_buffer import errors, trxp
from experience_buffer.v1 import types_pb2
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.store.base import AdvantageRow, Store

_FLOAT32_BYTES = 4
FRAME_BYTES = 1024 * 1024
"""Size at which a part of a streamed batch is sent."""


FLAGS = ("singleton", "zero_variance", "zero_mask", "bootstrapped", "masked")
"""Details of a computation that travel with each delivered experience."""


def read_payloads(
    store: Store, buffer: Buffer, entries: Sequence[Entry]
) -> list[tuple[bytes, AdvantageRow | None]]:
    """The TRXP payloads of stored experiences, advantages and returns in place, and their rows.

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
        result.append((payload if row is None else _with_advantages(payload, row), row))
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
                flags=[] if row is None else [flag for flag in FLAGS if row.details.get(flag)],
            )
            for entry, (payload, row) in zip(entries, payloads, strict=True)
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
    tensors = {"advantages": _column(row.advantages), "returns": _column(row.returns)}
    if row.details.get("masked"):
        tensors["action_mask"] = _zero_mask(payload, len(row.advantages) // _FLOAT32_BYTES)
    return trxp.with_tensors(payload, tensors)


def _zero_mask(payload: bytes, num_tokens: int) -> trxp.TensorView:
    """An all-zero action mask, of the pushed one's dtype."""
    item = trxp.read(payload)[0]
    if isinstance(item, errors.TrxpError):
        raise errors.DataLossError(f"a stored payload is damaged: {item}")
    pushed = item.tensors.get("action_mask")
    if pushed is None:
        return trxp.TensorView("BOOL", (num_tokens,), memoryview(bytes(num_tokens)))
    return trxp.TensorView(pushed.dtype, pushed.shape, memoryview(bytes(pushed.data.nbytes)))


def _column(data: bytes) -> trxp.TensorView:
    return trxp.TensorView("F32", (len(data) // _FLOAT32_BYTES,), memoryview(data))
