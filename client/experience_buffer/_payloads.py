"""Between experiences and payloads. Neither torch nor NumPy is needed, or loaded, for it.

Who encodes or decodes says of which class the experiences are: `Experience` stands above this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

from experience_buffer._arguments import misspelt, shown
from experience_buffer._codec import safetensors
from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.frame import aligned, frame_pieces
from experience_buffer._codec.item import (
    DTYPE_NAMES,
    META_FIELDS,
    MULTI_MODAL_PREFIX,
    TENSOR_FIELDS,
    Item,
)
from experience_buffer._codec.limits import Limits
from experience_buffer._codec.metadata import plain_metas
from experience_buffer._codec.payload import read
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense import convert
from experience_buffer._dense.rules import ANY, RULES
from experience_buffer._fields import CustomField
from experience_buffer.errors import ExperienceBufferError, TrxpError

E = TypeVar("E")

_FIELDS: Final = (*META_FIELDS, *TENSOR_FIELDS, "multi_modal_inputs", "custom_fields", "extra")
_STATE: Final = frozenset((*_FIELDS, "experience_type"))
"""The attributes that an experience keeps: what else it is given is its caller's."""
_NEEDED: Final = ("eid", "tokens")
_OWN: Final = "put it into info, or begin its name with _"
_CURE: Final = "give experience_buffer.Experience, or Trinity-RFT's"


def encode(experiences: Sequence[Any], make: Callable[..., Any]) -> bytes:
    """Do what `trxp.encode` says; `make` is `Experience`."""
    return b"".join(encode_pieces(experiences, make))


def encode_pieces(experiences: Sequence[Any], make: Callable[..., Any]) -> list[bytes | memoryview]:
    """Do what `encode` does, without joining.

    Returns:
        Pieces of the payload, some of them the tensors' own memory: what is changed before they
        are joined is changed in the payload too.
    """
    metas: list[dict[str, Any]] = []
    names: list[str] = []
    views: list[TensorView] = []
    for index, given in enumerate(experiences):
        if type(given) is make:
            experience = given
            if len(given.__dict__) > len(_STATE):
                _check_state(given, index)
        else:
            experience = _adopted(given, make, index)
        for field, kept in _kept(experience, index):
            names.append(f"{index}:{field}")
            views.append(_view(kept, field, index))
        metas.append(_meta(experience, index))
    return frame_pieces(plain_metas(metas), safetensors.write_fields(tuple(names), views))


def _check_state(experience: Any, index: int) -> None:
    """Check that nobody takes an attribute for one that is sent, by another spelling, say.

    Raises:
        TrxpError: There is one more, and it isn't private.
    """
    for name in experience.__dict__.keys() - _STATE:
        if not name.startswith("_"):
            raise trxp_error(
                f"{shown(name)} is no field of an Experience and would be lost; "
                f"{misspelt(name, dir(type(experience)), else_=_OWN)}",
                where=f"items[{index}]",
                item=index,
            )


def _view(kept: Any, field: str, index: int) -> TensorView:
    if type(kept) is TensorView:
        return kept
    try:
        return convert.view_of(kept, field, RULES.get(field, ANY))
    except (TypeError, ExperienceBufferError) as error:
        raise trxp_error(str(error), where=f"items[{index}].{field}", item=index) from None


def _adopted(given: Any, make: Callable[..., Any], index: int) -> Any:
    """An experience of a class of another package's, or of one derived from ours, as one of ours.

    Raises:
        TrxpError: It isn't one, or holds what ours can't.
    """
    where = f"items[{index}]"
    if isinstance(make, type) and isinstance(given, make):
        return given
    if not all(hasattr(given, name) for name in _NEEDED):
        raise trxp_error(
            f"a {type(given).__name__}, not an experience; "
            + ("make it one: Experience(**fields)" if isinstance(given, Mapping) else _CURE),
            where=where,
            item=index,
        )
    fields = {name: getattr(given, name) for name in _FIELDS if hasattr(given, name)}
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise trxp_error(str(error), where=where, item=index) from None


def decode(
    payload: bytes | bytearray | memoryview, make: Callable[..., E], *, limits: Limits
) -> list[E]:
    """Do what `trxp.decode` says; `make` is `Experience`."""
    return decode_on(aligned(payload, limits), make, limits=limits)


def decode_on(payload: memoryview, make: Callable[..., E], *, limits: Limits) -> list[E]:
    """Make experiences whose tensors are views on the payload, which must be writable.

    A tensor that isn't aligned there is copied; see `frame.aligned`.

    Raises:
        TrxpError: As `trxp.decode`.
    """
    experiences = []
    for item in read(payload, limits=limits):
        if isinstance(item, TrxpError):
            raise item
        experiences.append(_experience(item, make))
    return experiences


_read_meta = attrgetter(*META_FIELDS)


def _meta(experience: Any, index: int) -> dict[str, Any]:
    meta: dict[str, Any] = dict(zip(META_FIELDS, _read_meta(experience), strict=True))
    try:
        meta["eid"] = meta["eid"].to_dict()
    except ExperienceBufferError as error:
        raise trxp_error(str(error), where=f"items[{index}].eid", item=index) from None
    fields = experience.custom_fields
    try:
        meta["custom_fields"] = list(map(custom_field_entry, fields)) if fields else []
    except (AttributeError, TypeError):
        raise trxp_error(
            "something else than CustomField(source_field, destination_field, data_type); send a list of "
            "these",
            where=f"items[{index}].custom_fields",
            item=index,
        ) from None
    meta["multi_modal_input_keys"] = list(experience.multi_modal_inputs or ())
    return meta


def custom_field_entry(field: CustomField) -> dict[str, str]:
    """A custom field as plain data."""
    return {
        "source_field": field.source_field,
        "destination_field": field.destination_field,
        "data_type": str(field.data_type),
    }


def _kept(experience: Any, index: int) -> list[tuple[str, Any]]:
    """The fields that an experience keeps as tensors, as it keeps them."""
    state = experience.__dict__
    found = [(name, kept) for name in TENSOR_FIELDS if (kept := state[name]) is not None]
    images = experience.multi_modal_inputs
    if images:
        found += [(f"{MULTI_MODAL_PREFIX}{key}", kept) for key, kept in images.kept().items()]
    for name, kept in experience.extra.kept().items():
        if name in TENSOR_FIELDS or name.startswith(MULTI_MODAL_PREFIX):
            raise trxp_error(
                f"the name is taken; set the attribute {name.partition(':')[0]} instead",
                where=f"items[{index}].extra[{name!r}]",
                item=index,
            )
        found.append((name, kept))
    return found


def _experience(item: Item, make: Callable[..., E]) -> E:
    meta = item.meta
    given: dict[str, Any] = {name: meta[name] for name in META_FIELDS if name in meta}
    given["eid"] = item.eid
    given["custom_fields"] = list(map(custom_field, meta.get("custom_fields") or ()))
    extra = {}
    for name, view in item.tensors.items():
        if name in TENSOR_FIELDS:
            given[name] = view
        elif not name.startswith(MULTI_MODAL_PREFIX):
            extra[name] = view
    keys = meta.get("multi_modal_input_keys")
    if keys:
        given["multi_modal_inputs"] = {
            key: item.tensors[f"{MULTI_MODAL_PREFIX}{key}"] for key in keys
        }
    return make(extra=extra, **given)


def custom_field(entry: Mapping[str, str]) -> CustomField:
    """The custom field that `custom_field_entry` has described.

    Raises:
        ValueError: Its `data_type` is none of torch's.
    """
    name = entry["data_type"]
    if name not in DTYPE_NAMES:
        raise ValueError(f"custom field of data_type {shown(name)}; give a torch dtype")
    dtype = convert.torch_dtype(name)
    return CustomField(entry["source_field"], entry["destination_field"], dtype)
