"""TRXP payloads: read, divided, joined, and with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

from experience_buffer._codec import pickle_reader, safetensors
from experience_buffer._codec.codec_error import shown, trxp_error
from experience_buffer._codec.frame import KEYS, frame_pieces, join_frame, split_frame
from experience_buffer._codec.item import Item, read_item, share_keys
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.plain_values import Normaliser
from experience_buffer._codec.safetensors import Table, TensorView
from experience_buffer.errors import TrxpError

Buffer = bytes | bytearray | memoryview
"""What holds a payload."""

_Place = tuple[tuple[str, ...], Callable[[Sequence[TensorView]], Sequence[TensorView]]]
_MAX_KEPT: Final = 256
_MAX_KEPT_CHARS: Final = 16_384


def read(payload: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> list[Item | TrxpError]:
    """Read a payload's experiences without making tensors.

    The tensor views refer to `payload`, which must not change while they are used.

    Args:
        payload: One TRXP payload of any number of experiences.
        limits: Bounds on what it may ask for.

    Returns:
        For each experience the item, or what is wrong with it alone (its `item` is its index).

    Raises:
        TrxpError: The frame, the metadata as a whole or the tensor table is damaged or hostile.
    """
    metadata, section = split_frame(payload, limits=limits)
    top, is_suspect = pickle_reader.load(bytes(metadata), limits=limits)
    keys, metas = _checked_top(top, limits)
    table = safetensors.read_table(section, max_header_bytes=limits.max_header_bytes)
    tensors = _tensors_by_item(table, len(metas))
    normaliser = Normaliser(limits) if is_suspect else None
    return [
        read_item(index, meta, fields, keys=keys, normaliser=normaliser)
        if len(fields) <= limits.max_tensors
        else _too_many_tensors(index, len(fields), limits)
        for index, (meta, fields) in enumerate(zip(metas, tensors, strict=True))
    ]


def read_single(metadata: Buffer, tensors: dict[str, TensorView]) -> Item:
    """Read one experience whose tensors were read before, as a packed batch has them.

    Args:
        metadata: The metadata section of its payload.
        tensors: Its tensors by field.

    Raises:
        TrxpError: The metadata is damaged, or goes with other tensors.
    """
    top, is_suspect = pickle_reader.load(bytes(metadata), limits=DEFAULT_LIMITS)
    keys, metas = _checked_top(top, DEFAULT_LIMITS)
    if len(metas) != 1:
        raise trxp_error(f"{len(metas)} experiences, not 1", where="metadata")
    normaliser = Normaliser(DEFAULT_LIMITS) if is_suspect else None
    item = read_item(0, metas[0], tensors, keys=keys, normaliser=normaliser)
    return _sound([item])[0]


def split(payload: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> list[bytes]:
    """Cut a payload into single ones, each as its producer would have written it alone.

    Args:
        payload: Of any number of experiences.
        limits: Bounds on what a payload may ask of its reader.

    Raises:
        TrxpError: The payload, or any of its experiences, is damaged; or they share so much that
            what they take alone is out of all proportion.
    """
    singles = []
    room = most = limits.max_alone_bytes(memoryview(payload).nbytes)
    for item in _sound(read(payload, limits=limits)):
        singles.append(item.encode())
        room -= len(singles[-1])
        if room < 0:
            raise trxp_error(
                f"the experiences share so much that each alone they take over {most} bytes; send "
                "smaller batches",
                where="metadata",
            )
    return singles


def merge(payloads: Sequence[Buffer], *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Put the experiences of several payloads into one, in order.

    Equal dict keys become one object in the metadata, as they are for a producer who spells them
    in code; where that holds, the bytes are those the producer would have written.

    Args:
        payloads: Any number, of any number of experiences each.
        limits: Bounds on what a payload may ask of its reader.

    Raises:
        TrxpError: A payload, or any of its experiences, is damaged.
    """
    texts: dict[str, str] = {}
    items: list[Item] = []
    for payload in payloads:
        found = _sound(read(payload, limits=limits))
        if found:
            share_keys([item.meta for item in found], keys=found[0].keys, texts=texts)
        items += found
    return join_frame(
        [item.meta for item in items],
        [
            (f"{index}:{field}", view)
            for index, item in enumerate(items)
            for field, view in item.tensors.items()
        ],
        keys=tuple(texts[key] for key in KEYS) if items else KEYS,
    )


def with_tensors(payload: Buffer, tensors: Mapping[str, TensorView]) -> bytes:
    """Add tensors to a single experience's payload, or replace them; the metadata stays as it is.

    Args:
        payload: A payload of one experience, known to be sound: its metadata isn't read.
        tensors: Field names, such as `"advantages"`, and what they become.

    Returns:
        The payload that its producer would have written had these tensors been set.

    Raises:
        TrxpError: The frame or the tensor table is damaged, or a tensor of another experience is
            in it.
        ValueError: A name is that of a multi-modal input, whose keys the metadata lists.
    """
    return b"".join(pieces_with_tensors(payload, tensors))


def pieces_with_tensors(
    payload: Buffer, tensors: Mapping[str, TensorView]
) -> list[bytes | memoryview]:
    """Do what `with_tensors` does, without joining: some of the pieces are views of the payload."""
    metadata, section = split_frame(payload, limits=DEFAULT_LIMITS)
    views: dict[str, TensorView] = {}
    table = safetensors.read(section, max_header_bytes=DEFAULT_LIMITS.max_header_bytes)
    for name, view in table:
        if not name.startswith("0:"):
            raise trxp_error(
                "with_tensors takes the payload of one experience; split it first",
                where=f"tensor table {name!r}",
            )
        views[name] = view
    for field, view in tensors.items():
        if field.startswith("multi_modal_inputs:"):
            raise ValueError(f"{field!r} can't be added: its key is part of the metadata")
        views[f"0:{field}"] = view
    return frame_pieces(metadata, safetensors.write(views.items()))


def read_tensors(data: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, TensorView]:
    """Read a bare safetensors file: tensors by name, as views.

    Raises:
        TrxpError: It is damaged, or its table exceeds the limits.
    """
    view = memoryview(data).cast("B")
    return dict(safetensors.read(view, max_header_bytes=limits.max_header_bytes))


def _sound(items: list[Item | TrxpError]) -> list[Item]:
    sound = []
    for item in items:
        if isinstance(item, TrxpError):
            raise item
        sound.append(item)
    return sound


def _tensors_by_item(table: Table, num_items: int) -> Iterable[dict[str, TensorView]]:
    names, views = table.names, table.views
    is_small = max(len(names), num_items) <= _MAX_KEPT and sum(map(len, names)) <= _MAX_KEPT_CHARS
    places = (_kept_places if is_small else _places)(names, num_items)
    return [dict(zip(fields, pick(views), strict=False)) for fields, pick in places]


def _places(names: tuple[str, ...], num_items: int) -> Sequence[_Place]:
    """For each experience its fields, and what takes their tensors out of the table.

    Raises:
        TrxpError: A name isn't one, or occurs twice.
    """
    by_index: dict[str, dict[str, int]] = {str(i): {} for i in range(num_items)}
    for place, name in enumerate(names):
        index, colon, field = name.partition(":")
        fields = by_index.get(index)
        if fields is None or not colon:
            raise trxp_error(
                f"a name is `index:field` with an index below {num_items}",
                where=f"tensor table {name[:200]!r}",
            )
        if field in fields:
            raise trxp_error("the name occurs twice", where=f"tensor table {name[:200]!r}")
        fields[field] = place
    return [(tuple(fields), _picker(tuple(fields.values()))) for fields in by_index.values()]


def _picker(places: tuple[int, ...]) -> Callable[[Sequence[TensorView]], Sequence[TensorView]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda views: [views[place] for place in places]


_kept_places = lru_cache(maxsize=64)(_places)
"""Most tables have the names of one before. What is kept is a few megabytes at most."""


def _too_many_tensors(index: int, num_tensors: int, limits: Limits) -> TrxpError:
    return trxp_error(
        f"{num_tensors} tensors exceed the limit of {limits.max_tensors} (max_tensors); join some",
        where=f"items[{index}]",
        item=index,
    )


def _checked_top(top: object, limits: Limits) -> tuple[tuple[str, ...], list[Any]]:
    """Return the keys as the payload's own objects, in canonical order, and the items."""
    if type(top) is not dict or top.keys() != set(KEYS):
        raise trxp_error("not a dict of version, num_items and items alone", where="metadata")
    if top["version"] != 1 or type(top["version"]) is not int:
        raise trxp_error(f"version {shown(top['version'])}; this reader knows 1", where="metadata")
    metas = top["items"]
    if type(metas) is not list:
        raise trxp_error(f"items is a {type(metas).__name__}, not a list", where="metadata")
    if len(metas) > limits.max_items:
        raise trxp_error(
            f"{len(metas)} items exceed the limit of {limits.max_items}; send smaller batches",
            where="metadata",
        )
    if type(top["num_items"]) is not int or top["num_items"] != len(metas):
        raise trxp_error(
            f"num_items is {shown(top['num_items'])}, but there are {len(metas)} items",
            where="metadata",
        )
    by_text = {key: key for key in top}
    return tuple(by_text[key] for key in KEYS), metas
