"""From leased units to what travels: payloads with their computed advantages in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experience_buffer import errors, trxp
from experience_buffer.packed import Facts, PackedRow, pack
from experience_buffer.v1 import types_pb2
from experience_buffer_server.admission import ORDINARY
from experience_buffer_server.buffer import Buffer
from experience_buffer_server.groups import Entry
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.base import AdvantageRow, Record, Store

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
        payload = _there(buffer, entry, payload)
        if row is not None:
            payload = trxp.with_tensors(payload, _computed_tensors(payload, row))
        result.append((payload, row))
    return result


def sampled(
    store: Store, buffer: Buffer, units: Sequence[Unit]
) -> Iterator[list[types_pb2.SampledExperience]]:
    """The experiences of leased units, unit by unit.

    Raises:
        DataLossError: A payload is gone or damaged.
    """
    for unit in list(units):
        entries = buffer.contents.by_seqs(unit.seqs)
        payloads = read_payloads(store, buffer, entries)
        yield [
            types_pb2.SampledExperience(
                uid=entry.record.uid,
                group=_group_key(entry),
                payload=payload,
                num_deliveries=unit.num_deliveries,
                staleness=buffer.staleness(entry),
                flags=_flags(unit, row),
                probability=unit.probability,
                times_sampled=unit.times_sampled,
                generation=entry.record.generation,
            )
            for entry, (payload, row) in zip(entries, payloads, strict=True)
        ]


def packed(store: Store, buffer: Buffer, units: Sequence[Unit]) -> list[bytes | memoryview]:
    """The experiences of leased units as one packed batch, in pieces.

    Raises:
        DataLossError: A payload is gone or damaged.
    """
    rows = []
    for unit in units:
        entries = buffer.contents.by_seqs(unit.seqs)
        payloads = store.payloads(buffer.id, [entry.record.uid for entry in entries])
        computed = store.advantages(buffer.id, [entry.record.seq for entry in entries])
        for entry, payload, row in zip(entries, payloads, computed, strict=True):
            payload = _there(buffer, entry, payload)
            rows.append(
                PackedRow(
                    uid=entry.record.uid,
                    group=_group_key(entry),
                    payload=payload,
                    facts=_facts(entry.record),
                    tensors={} if row is None else _computed_tensors(payload, row),
                    num_deliveries=unit.num_deliveries,
                    staleness=buffer.staleness(entry),
                    flags=_flags(unit, row),
                    probability=unit.probability,
                    times_sampled=unit.times_sampled,
                    generation=entry.record.generation,
                )
            )
    return pack(rows)


def frames(
    store: Store, buffer: Buffer, units: Sequence[Unit]
) -> Iterator[list[types_pb2.SampledExperience]]:
    """The experiences of leased units in parts of about `FRAME_BYTES`.

    Raises:
        DataLossError: A payload is gone or damaged.
    """
    part: list[types_pb2.SampledExperience] = []
    num_bytes = 0
    for experiences in sampled(store, buffer, units):
        for experience in experiences:
            if part and num_bytes + len(experience.payload) > FRAME_BYTES:
                yield part
                part, num_bytes = [], 0
            part.append(experience)
            num_bytes += len(experience.payload)
    yield part


def _facts(record: Record) -> Facts | None:
    """What the packed batch repeats of the metadata, where the record knows it all."""
    if not record.fields & ORDINARY:
        return None
    return Facts(
        response_length=record.response_tokens,
        reward=record.reward,
        truncate_status=None,
        run=record.run,
        step=record.step,
    )


def _group_key(entry: Entry) -> str:
    return "" if entry.group is None else entry.group.row.key


def _flags(unit: Unit, row: AdvantageRow | None) -> list[str]:
    flags = [] if row is None else [flag for flag in FLAGS if row.details.get(flag)]
    return [*flags, "stale"] if unit.stale else flags


def _there(buffer: Buffer, entry: Entry, payload: bytes | None) -> bytes:
    if payload is None:
        raise errors.DataLossError(
            f"the payload of {entry.record.uid!r} in buffer {buffer.name!r} is gone; "
            "delete the experience",
            subject=entry.record.uid,
        )
    return payload


def _computed_tensors(payload: bytes, row: AdvantageRow) -> dict[str, trxp.TensorView]:
    """What takes the place of the pushed tensors of these names."""
    tensors = {"advantages": _column(row.advantages), "returns": _column(row.returns)}
    if row.details.get("masked"):
        tensors["action_mask"] = _zero_mask(payload, len(row.advantages) // _FLOAT32_BYTES)
    return tensors


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
