"""What a batch holds beside what is laid out per token: nothing that was pushed is left behind.

Inputs of other modalities, custom fields, tensors of any other name, and what was asked for of each
experience. B is the number of experiences. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from experience_buffer._arguments import shown
from experience_buffer._codec.item import META_FIELDS, MULTI_MODAL_PREFIX, Item
from experience_buffer._dense import convert
from experience_buffer._dense.tensors import tensor_of
from experience_buffer._packed.exact import exactly
from experience_buffer._payloads import custom_field
from experience_buffer.eid import EID
from experience_buffer.errors import InvalidRequestError
from experience_buffer.experience import CustomField
from experience_buffer.packed import PackedBatch

IMAGES: Final = "multi_modal_inputs"
CUSTOM: Final = "custom_fields"
_MARK: Final = b"source_field"
"""What metadata that has custom fields holds: reading all of it takes longer than laying it out."""
_META: Final = frozenset(META_FIELDS) - {"eid"}
_ItemOf = Callable[[int], Item]
"""Reads an experience, once."""
_DELIVERY: Final = frozenset(
    {
        *("group", "flags", "num_deliveries", "staleness", "has_staleness"),
        *("probability", "times_sampled", "generation"),
    }
)
"""Columns that the delivery of an experience has, and not itself."""


def add(
    batch: dict[str, Any],
    packed: PackedBatch,
    *,
    taken: Collection[str],
    columns: Sequence[str],
    drop: Collection[str],
    is_delivered: bool,
    listed: Callable[[list[Any]], Any] = list,
) -> dict[str, Any]:
    """Add to a batch what of its experiences isn't in it yet.

    Args:
        batch: What was laid out; it is changed.
        packed: The experiences.
        taken: Tensor fields that are in the batch, or were left out on purpose.
        columns: What is asked for of each experience.
        drop: Fields to leave out.
        is_delivered: Whether the experiences know how they were delivered.
        listed: Makes an entry of B objects.

    Returns:
        The same batch.

    Raises:
        InvalidRequestError: An entry's name is that of another, or a list of experiences can't know
            a column.
        KeyError: There is no such column.
        ValueError: Experiences have other custom fields than others, or `info` lacks one's source,
            or its value isn't of the field's dtype; or one has no reward or staleness, and the column
            that says so isn't asked for.
    """
    item_of = cache(packed._item)
    for name, values in _others(packed, {*taken, *drop, "tokens"}).items():
        _check_name(batch, name)
        batch[name] = listed(values)
    if IMAGES not in drop and any(name.startswith(MULTI_MODAL_PREFIX) for name in packed.fields):
        _check_name(batch, IMAGES)
        batch[IMAGES] = listed(_multi_modal_inputs(packed, item_of))
    for field in _custom_fields(packed, item_of) if CUSTOM not in drop else ():
        if field.destination_field not in drop:
            _check_name(batch, field.destination_field)
            batch[field.destination_field] = _custom_values(packed, item_of, field)
    for name in columns:
        _check_name(batch, name)
        if name in _DELIVERY and not is_delivered:
            raise InvalidRequestError(
                f"a list of experiences doesn't know column {name!r}, which belongs to their "
                "delivery: give the batch itself, or let the dataset have format='packed'",
                subject="columns",
            )
        if f"has_{name}" in packed._table.columns and f"has_{name}" not in columns:
            _check_column(packed, name)
        batch[name] = _column(packed, item_of, name, listed)
    return batch


def _check_name(batch: dict[str, Any], name: str) -> None:
    if name in batch:
        raise InvalidRequestError(
            f"{name!r:.80} has the name of another entry of the batch: leave one of them out, by columns, "
            "fields or drop, or push it under another name",
            subject=name,
        )


def _others(packed: PackedBatch, taken: Collection[str]) -> dict[str, list[Tensor | None]]:
    """Tensors of any other name as they are, None where an experience has none."""
    found = {}
    for name, forms in packed._table.fields.items():
        if name in taken or name.startswith(MULTI_MODAL_PREFIX):
            continue
        values: list[Tensor | None] = [None] * len(packed)
        for form in forms:
            for index, is_present in enumerate(form.present):
                if is_present:
                    values[index] = tensor_of(form.of(index))
        found[name] = values
    return found


def _multi_modal_inputs(packed: PackedBatch, item_of: _ItemOf) -> list[dict[str, Tensor]]:
    """Of each experience its inputs by key; empty where it has none."""
    found = []
    for item in map(item_of, range(len(packed))):
        keys = item.meta.get("multi_modal_input_keys") or ()
        found.append({key: tensor_of(item.tensors[f"{MULTI_MODAL_PREFIX}{key}"]) for key in keys})
    return found


def _custom_fields(packed: PackedBatch, item_of: _ItemOf) -> list[CustomField]:
    """The custom fields, which all experiences have to share."""
    if not any(_MARK in bytes(meta) for meta in packed._table.values["meta"]):
        return []
    known = [item_of(index).meta.get(CUSTOM) or [] for index in range(len(packed))]
    for index, fields in enumerate(known):
        if fields != known[0]:
            names = [
                [f"{each['source_field']} -> {each['destination_field']}" for each in fields]
                for fields in (known[0], fields)
            ]
            raise ValueError(
                f"custom_fields of {packed.uids[0]} are {names[0]!s:.200}, those of "
                f"{packed.uids[index]} {names[1]!s:.200}: push the same ones with all experiences, or drop=['custom_fields']"
            )
    return list(map(custom_field, known[0]))


def _custom_values(packed: PackedBatch, item_of: _ItemOf, field: CustomField) -> Tensor:
    """One field's values, shape [B, ...]."""
    source, name = field.source_field, field.destination_field
    values: list[Tensor] = []
    for index, uid in enumerate(packed.uids):
        info = item_of(index).meta.get("info") or {}
        if source not in info:
            raise ValueError(
                f"{uid}: info has no {source!r:.80}, of which its custom field {name!r:.80} is made; it "
                f"has {sorted(map(str, info))!s:.200}"
            )
        value = _plain(info[source], _entry(uid, source, []), name)
        values.append(
            exactly(
                value,
                convert.torch_dtype(str(field.data_type)),
                where=partial(_entry, uid, source),
                cure=f"give the custom field {name!r:.80} another data_type",
            )
        )
        if values[-1].shape != values[0].shape:
            raise ValueError(
                f"{uid}: info[{source!r:.80}] has the shape {list(values[-1].shape)}, that of "
                f"{packed.uids[0]} {list(values[0].shape)}; the custom field {name!r:.80} needs one shape"
            )
    return torch.stack(values)


def _entry(uid: str, source: str, place: list[int]) -> str:
    return f"{uid}: info[{source!r:.80}]{place or ''}"


def _plain(value: Any, where: str, name: str) -> Tensor:
    """A number, or a list of numbers, in a dtype that holds it."""
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError:  # Lists of different lengths.
        array = np.asarray(None)
    if array.dtype.kind == "f":
        # Whole numbers among fractions, or beyond 63 bits among negative ones.
        given = np.asarray(value, dtype=object).flat
        for each, kept in zip(given, array.flat, strict=True):
            if isinstance(each, int) and int(kept) != each:
                raise ValueError(
                    f"{where} holds {each}, which float64 can't hold, and other numbers that no "
                    f"integer dtype holds; the custom field {name!r:.80} needs one dtype for all"
                )
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"{where} is {shown(value)}; the custom field {name!r:.80} needs a number of at most 64 bits, or a list of such"
        )
    # Not its own dtype: of two names for 64 bits torch knows one.
    return torch.from_numpy(array.astype(f"{array.dtype.kind}{array.dtype.itemsize}"))


def _check_column(packed: PackedBatch, name: str) -> None:
    """Check that all experiences have what a column has a number for in any case."""
    has = packed.column(f"has_{name}")
    if not has.all():
        index = int((~has).nonzero()[0])
        number = packed.column(name)[index].item()
        raise ValueError(
            f"{packed.uids[index]} has no {name}, for which column {name!r} would have {number}: add "
            f"'has_{name}' to columns, which says who has one, or leave both out"
        )


def _column(
    packed: PackedBatch, item_of: _ItemOf, name: str, listed: Callable[[list[Any]], Any]
) -> Any:
    """What is asked for of each experience."""
    if name in packed._table.columns:
        return packed.column(name)
    if name in _META:
        return listed([item_of(index).meta.get(name) for index in range(len(packed))])
    texts: dict[str, Callable[[], list[Any]]] = {
        "uid": lambda: packed.uids,
        "task": lambda: tasks(packed),
        "group": lambda: packed.groups,
        "flags": lambda: packed.flags,
    }
    if name not in texts:
        known = ", ".join(sorted({*packed.columns, *_META, *texts}))
        raise KeyError(f"no column {name!r}; there are {known}")
    return listed(texts[name]())


def tasks(packed: PackedBatch) -> list[str]:
    """Name of each one's task, `EID.tid`."""
    found = []
    for index, uid in enumerate(packed.uids):
        parts = uid.split("/")
        # Five parts are those of the identity. Texts that hold a slash make more of them.
        eid = EID(parts[0], parts[1]) if len(parts) == 5 else packed._item(index).eid
        found.append(eid.tid)
    return found
