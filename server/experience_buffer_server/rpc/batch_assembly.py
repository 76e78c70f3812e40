"""From leased units to what travels: payloads with their computed advantages in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias, TypeVar

from experience_buffer import errors, trxp
from experience_buffer._codec import payload as payload_codec
from experience_buffer._messages.sample_bytes import Pieces, experience_pieces
from experience_buffer.packed import Facts, PackedRow, pack
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.buffer import Buffer
from experience_buffer_server.buffer.delivery.damage import LEFT
from experience_buffer_server.buffer.state.entries import ORDINARY, Entry
from experience_buffer_server.sampling.leases import Lease
from experience_buffer_server.sampling.units import Unit
from experience_buffer_server.store.interface import (
    AdvantageRow,
    DamagedRecordError,
    Found,
    Record,
    Store,
)

_FLOAT32_BYTES = 4

_Payload = TypeVar("_Payload", bytes, memoryview)
_Read: TypeAlias = tuple[Entry, _Payload, AdvantageRow | None]
"""One experience as the store has it: its payload, and what was computed for it."""
_Joined = TypeVar("_Joined")
_Delivered = TypeVar("_Delivered")


class Sampled(NamedTuple):
    """One experience as it is delivered."""

    rest: bytes
    """A `SampledExperience` without its payload, as it goes over the wire."""
    payload: Pieces
    num_bytes: int
    """Of the payload."""


class Unreadable:
    """Units of one batch that can't be read: collected while the others are assembled."""

    def __init__(self) -> None:
        self.units: set[Unit] = set()
        """A batch may have many, each of which is looked for here."""
        self.reasons: dict[int, str] = {}
        """By seq, what can't be read, and why."""
        self._num_damaged = 0

    def __bool__(self) -> bool:
        return bool(self.units)

    def add(self, unit: Unit, reasons: Mapping[int, str]) -> None:
        """A unit can't be delivered, for what is wrong with some of its members."""
        self.units.add(unit)
        self.reasons.update(reasons)
        self._num_damaged += any(reason != LEFT for reason in reasons.values())

    def left_of(self, units: Sequence[Unit]) -> int:
        """How many of a batch's units are delivered; repeats count."""
        return sum(unit not in self.units for unit in units)

    def settle(self, buffer: Buffer, lease: Lease, *, least: int) -> bool:
        """Go on with a lease of which units can't be read; whether the rest is delivered.

        Args:
            buffer: Whose lease it is.
            lease: Being delivered.
            least: The fewest units worth delivering.
        """
        is_enough = self.left_of(lease.units) >= least
        return buffer.settle(lease, self.units, self.reasons, is_enough=is_enough)

    def explain(self, shortfall: str) -> str:
        """Why a batch has less than was asked for."""
        texts = [shortfall] if shortfall else []
        if number := self._num_damaged:
            verb = "was" if number == 1 else "were"
            texts.append(f"{number} more {verb} set aside: damaged on the disk")
        if number := len(self.units) - self._num_damaged:
            verb = "was" if number == 1 else "were"
            texts.append(f"{number} more {verb} removed meanwhile")
        return "; ".join(texts)


def pieces_of(experiences: Iterable[Sampled]) -> Pieces:
    """Experiences as they go into a message."""
    return [piece for rest, payload, _ in experiences for piece in experience_pieces(rest, payload)]


def read_payload(store: Store, buffer: Buffer, entry: Entry) -> tuple[bytes, AdvantageRow | None]:
    """The TRXP payload of a stored experience, advantages and returns in place, and their row.

    Raises:
        DataLossError: A row of it is gone or damaged, now or before: it is set aside.
        ExperienceNotFoundError: It is being removed.
    """
    buffer.check_sound(entry)
    reasons: dict[int, str] = {}
    payloads = store.payloads(buffer.id, [entry.record.uid])
    computed = store.advantages(buffer.id, [entry.record.seq])
    reads = _reads(buffer, [entry], zip(payloads, computed, strict=True), reasons)
    payload = b"" if reasons else b"".join(_filled(*reads[0], reasons))
    buffer.set_aside(reasons)
    buffer.check_sound(entry)
    if reasons:
        uid = entry.record.uid
        raise errors.ExperienceNotFoundError(
            f"experience {uid!r} of buffer {buffer.name!r} is being removed", subject=uid
        )
    return payload, reads[0][2]


def sampled(
    store: Store,
    buffer: Buffer,
    units: Sequence[Unit],
    unreadable: Unreadable,
    join: Callable[[Sequence[Sampled]], _Joined],
) -> _Joined:
    """The experiences of leased units, with what was computed for them.

    What can't be read goes to `unreadable` and isn't among them.

    Args:
        store: Where they are.
        buffer: Whose they are.
        units: In the order of their delivery.
        unreadable: Whether it is empty is known when `join` is called.
        join: Takes the experiences and copies them, at once: they are views of the store.

    Returns:
        What `join` returns.
    """
    # Messages of their own would bring protobuf to return free memory to the kernel.
    add = service_pb2.SampleFrame().experiences.add

    def deliver(
        unit: Unit, reads: Sequence[_Read[memoryview]], reasons: dict[int, str]
    ) -> list[Sampled]:
        delivered = []
        for entry, payload, row in reads:
            pieces = _filled(entry, payload, row, reasons)
            message = add(
                uid=entry.record.uid,
                group=_group_key(entry),
                num_deliveries=unit.num_deliveries,
                staleness=buffer.staleness(entry),
                flags=_flags(unit, row),
                probability=unit.probability,
                times_sampled=unit.times_sampled,
                generation=entry.record.generation,
            )
            delivered.append(Sampled(message.SerializeToString(), pieces, sum(map(len, pieces))))
        return delivered

    with _stored(store, buffer, units, unreadable, deliver) as experiences:
        if not unreadable:
            return join(experiences)
        # What follows damage is a longer way, which may read from the store.
        copies = [each._replace(payload=[b"".join(each.payload)]) for each in experiences]
    return join(copies)


def packed(
    store: Store,
    buffer: Buffer,
    units: Sequence[Unit],
    unreadable: Unreadable,
    join: Callable[[Pieces], _Joined],
) -> _Joined:
    """The experiences of leased units as one packed batch.

    What can't be read, or not be packed, goes to `unreadable` and isn't in the batch.

    Args:
        store: Where they are.
        buffer: Whose they are.
        units: In the batch's order.
        unreadable: Whether it is empty is known when `join` is called.
        join: Takes the batch in pieces and copies them, at once: they are views of the store.

    Returns:
        What `join` returns.
    """
    while True:
        with _stored(store, buffer, units, unreadable, partial(_rows, buffer)) as rows:
            try:
                pieces = pack(rows)
            except errors.DataLossError as error:
                _find_culprit(buffer, units, unreadable, error)
                continue
            if not unreadable:
                return join(pieces)
            # As above.
            pieces = [b"".join(pieces)]
        return join(pieces)


@contextmanager
def _stored(
    store: Store,
    buffer: Buffer,
    units: Sequence[Unit],
    unreadable: Unreadable,
    deliver: Callable[[Unit, Sequence[_Read[memoryview]], dict[int, str]], list[_Delivered]],
) -> Iterator[list[_Delivered]]:
    """What `deliver` makes of each unit that can be read, as long as it can be looked at."""
    left = [unit for unit in units if unit not in unreadable.units]
    members = [_members(buffer, unit) for unit in left]
    records = [entry.record for entries, _ in members for entry in entries]
    uids, seqs = [record.uid for record in records], [record.seq for record in records]
    with store.stored(buffer.id, uids, seqs) as (payloads, computed):
        found = zip(payloads, computed, strict=True)
        delivered: list[_Delivered] = []
        for unit, (entries, reasons) in zip(left, members, strict=True):
            reads = _reads(buffer, entries, islice(found, len(entries)), reasons)
            of_unit = deliver(unit, reads, reasons)
            if not reasons:
                delivered += of_unit
            elif unit not in unreadable.units:
                unreadable.add(unit, reasons)
        yield delivered


def _find_culprit(
    buffer: Buffer, units: Sequence[Unit], unreadable: Unreadable, error: errors.DataLossError
) -> None:
    """Note the unit that keeps a batch from being packed."""
    entry = buffer.find(error.subject)
    culprit = next(
        (unit for unit in units if entry is not None and entry.record.seq in unit.seqs), None
    )
    if entry is None or culprit is None or culprit in unreadable.units:
        raise error
    unreadable.add(culprit, {entry.record.seq: str(error)})


def _rows(
    buffer: Buffer, unit: Unit, reads: Sequence[_Read[memoryview]], reasons: dict[int, str]
) -> list[PackedRow]:
    rows = []
    for entry, payload, row in reads:
        try:
            tensors = {} if row is None else _computed_tensors(payload, row)
        except errors.TrxpError as error:
            reasons[entry.record.seq] = f"its payload is damaged: {error}"
            continue
        record = entry.record
        rows.append(
            PackedRow(
                uid=record.uid,
                group=_group_key(entry),
                payload=payload,
                facts=_facts(record),
                tensors=tensors,
                num_deliveries=unit.num_deliveries,
                staleness=buffer.staleness(entry),
                flags=_flags(unit, row),
                probability=unit.probability,
                times_sampled=unit.times_sampled,
                generation=record.generation,
            )
        )
    return rows


def _members(buffer: Buffer, unit: Unit) -> tuple[list[Entry], dict[int, str]]:
    """The experiences of a unit; by seq, why some of them can't be read: they have left.

    None has while the unit's lease is open, unless the buffer was deleted.
    """
    entries = buffer.entries(unit.seqs)
    if len(entries) == len(unit.seqs):
        return entries, {}
    return entries, dict.fromkeys({*unit.seqs}.difference(e.record.seq for e in entries), LEFT)


def _reads(
    buffer: Buffer,
    entries: Sequence[Entry],
    found: Iterable[tuple[Found[_Payload], Found[AdvantageRow]]],
    reasons: dict[int, str],
) -> list[_Read[_Payload]]:
    """What was found of entries; by seq, why some of it can't be read.

    What isn't there because it is being removed is no damage: its reason is `LEFT`.
    """
    reads: list[_Read[_Payload]] = []
    for entry, (payload, row) in zip(entries, found, strict=True):
        if payload is None or isinstance(payload, DamagedRecordError):
            reasons[entry.record.seq] = str(payload or "its payload is gone")
        elif isinstance(row, DamagedRecordError):
            reasons[entry.record.seq] = str(row)
        elif row is None and entry.magnitude:
            reasons[entry.record.seq] = "its advantages are gone"
        else:
            reads.append((entry, payload, row))
            continue
        if buffer.closed or entry.leaving:
            # The disk may know of a removal before its commit has been answered here.
            reasons[entry.record.seq] = LEFT
    return reads


def _filled(
    entry: Entry, payload: bytes | memoryview, row: AdvantageRow | None, reasons: dict[int, str]
) -> Pieces:
    """The payload with what was computed; or why that can't be put into it."""
    if row is None:
        return [payload]
    try:
        return payload_codec.pieces_with_tensors(payload, _computed_tensors(payload, row))
    except errors.TrxpError as error:
        reasons[entry.record.seq] = f"its payload is damaged: {error}"
        return []


def _facts(record: Record) -> Facts | None:
    """What the packed batch repeats of the metadata, where the record knows it all."""
    if not record.fields & ORDINARY:
        return None
    _, _, run, step = record.parts
    return Facts(
        response_length=record.response_tokens,
        reward=record.reward,
        truncate_status=None,
        run=run,
        step=step,
    )


def _group_key(entry: Entry) -> str:
    return "" if entry.group is None else entry.group.row.key


def _flags(unit: Unit, row: AdvantageRow | None) -> list[str]:
    flags = [] if row is None else row.flags
    return [*flags, "stale"] if unit.stale else flags


def _computed_tensors(payload: bytes | memoryview, row: AdvantageRow) -> dict[str, trxp.TensorView]:
    """What takes the place of the pushed tensors of these names.

    Raises:
        TrxpError: The payload can't be read.
    """
    tensors = {"advantages": _column(row.advantages), "returns": _column(row.returns)}
    if row.details.get("masked"):
        tensors["action_mask"] = _zero_mask(payload, len(row.advantages) // _FLOAT32_BYTES)
    return tensors


def _zero_mask(payload: bytes | memoryview, num_tokens: int) -> trxp.TensorView:
    """An all-zero action mask, of the pushed one's dtype."""
    item = trxp.read(payload)[0]
    if isinstance(item, errors.TrxpError):
        raise item
    pushed = item.tensors.get("action_mask")
    if pushed is None:
        return trxp.TensorView("BOOL", (num_tokens,), memoryview(bytes(num_tokens)))
    return trxp.TensorView(pushed.dtype, pushed.shape, memoryview(bytes(pushed.data.nbytes)))


def _column(data: bytes) -> trxp.TensorView:
    return trxp.TensorView("F32", (len(data) // _FLOAT32_BYTES,), memoryview(data))
