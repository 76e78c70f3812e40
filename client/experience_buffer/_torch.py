"""Between experiences and payloads: the only part of the codec that needs torch.

Who decodes says of which class the experiences are to be: `Experience` stands above this.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

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
from experience_buffer._codec.safetensors import ITEM_BYTES, MAX_DIMENSIONS, TensorView, too_large
from experience_buffer._fields import CustomField
from experience_buffer.eid import EID
from experience_buffer.errors import TrxpError

E = TypeVar("E")

_DTYPES: Final = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}


class _Memory(ctypes.Array[ctypes.c_ubyte]):
    """All memory from an address on; views of it keep its owner alive."""

    _type_ = ctypes.c_ubyte
    _length_ = sys.maxsize
    __slots__ = ("owner",)
    owner: Tensor


def tensor_view(tensor: Tensor) -> TensorView:
    """Copy a tensor's elements into a view, from any device.

    Raises:
        TypeError: Not a dense tensor of a dtype and a shape that the format has.
    """
    view = _memory_view(tensor)
    return TensorView(view.dtype, tuple(view.shape), memoryview(bytes(view.data)))


def _memory_view(tensor: Tensor) -> TensorView:
    """Do what `tensor_view` does, without a copy where the elements lie in memory as written."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a {type(tensor).__name__}, not a tensor")
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.layout != torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype}, {tensor.layout}; send a dense common dtype")
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if code == "C64":
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    dense = tensor.contiguous()
    if (not dense.nbytes or dense.dim() > MAX_DIMENSIONS) and (reason := too_large(dense.shape)):
        raise TypeError(reason)
    memory = _Memory.from_address(dense.data_ptr())
    memory.owner = dense
    return TensorView(code, dense.size(), memoryview(memory)[: dense.nbytes])


def tensor(view: TensorView) -> Tensor:
    """Make a tensor on a view's memory, which must be writable; copied only if misaligned."""
    dtype = _DTYPES.get(view.dtype)
    if dtype is None:
        raise trxp_error(f"this version of torch has no {view.dtype}", where="tensors")
    if not len(view.data):
        return torch.empty(view.shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(view.data, dtype=dtype)
    if flat.data_ptr() % ITEM_BYTES[view.dtype]:
        flat = flat.clone()
    return flat if len(view.shape) == 1 else flat.view(view.shape)


def common_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that two promote to; int64 where torch has no rule for its unsigned integers.

    Raises:
        ValueError: They have none in common.
    """
    if one is other:
        return one
    try:
        return torch.promote_types(one, other)
    except RuntimeError:
        kinds = (one, other)
        has_floats = any(kind.is_floating_point or kind.is_complex for kind in kinds)
        if has_floats or torch.uint64 in kinds:
            raise ValueError(
                f"{one} in some experiences and {other} in others have no common dtype"
            ) from None
        return torch.int64


def encode(experiences: Sequence[Any]) -> bytes:
    """Do what `trxp.encode` says."""
    return b"".join(encode_pieces(experiences))


def encode_pieces(experiences: Sequence[Any]) -> list[bytes | memoryview]:
    """Do what `encode` does, without joining.

    Returns:
        Pieces of the payload, some of them the tensors' own memory: what is changed before they
        are joined is changed in the payload too.
    """
    tensors: list[tuple[str, TensorView]] = []
    for index, experience in enumerate(experiences):
        for field, value in _tensors(experience, index):
            try:
                tensors.append((f"{index}:{field}", _memory_view(value)))
            except TypeError as error:
                raise trxp_error(str(error), where=f"items[{index}].{field}", item=index) from None
    metas = plain_metas([_meta(experience) for experience in experiences])
    return frame_pieces(metas, safetensors.write(tensors))


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
_read_tensors = attrgetter(*TENSOR_FIELDS)


def _meta(experience: Any) -> dict[str, Any]:
    meta: dict[str, Any] = dict(zip(META_FIELDS, _read_meta(experience), strict=True))
    eid = meta["eid"]
    if isinstance(eid, EID):
        meta["eid"] = eid.to_dict()
    fields = experience.custom_fields
    meta["custom_fields"] = list(map(custom_field_entry, fields)) if fields else []
    meta["multi_modal_input_keys"] = list(experience.multi_modal_inputs or ())
    return meta


def custom_field_entry(field: CustomField) -> dict[str, str]:
    """A custom field as plain data."""
    return {
        "source_field": field.source_field,
        "destination_field": field.destination_field,
        "data_type": str(field.data_type),
    }


def _tensors(experience: Any, index: int) -> list[tuple[str, Tensor]]:
    found = [
        (name, value)
        for name, value in zip(TENSOR_FIELDS, _read_tensors(experience), strict=True)
        if value is not None
    ]
    images = experience.multi_modal_inputs or {}
    if len(set(map(str, images))) != len(images):
        raise trxp_error(
            "two keys, such as 1 and '1', are written alike; use texts",
            where=f"items[{index}].multi_modal_inputs",
            item=index,
        )
    for key, value in images.items():
        found.append((f"{MULTI_MODAL_PREFIX}{key}", value))
    for name, value in experience.extra.items():
        if name in TENSOR_FIELDS or name.startswith(MULTI_MODAL_PREFIX):
            raise trxp_error(
                f"the name is taken; set the attribute {name.partition(':')[0]} instead",
                where=f"items[{index}].extra[{name!r}]",
                item=index,
            )
        found.append((name, value))
    return found


def _experience(item: Item, make: Callable[..., E]) -> E:
    meta = item.meta
    given: dict[str, Any] = {name: meta[name] for name in META_FIELDS if name in meta}
    given["eid"] = item.eid
    given.setdefault("prompt_length", 1)  # As Trinity-RFT reads a payload that doesn't say it.
    given["custom_fields"] = list(map(custom_field, meta.get("custom_fields") or ()))
    extra = {}
    for name, view in item.tensors.items():
        if name in TENSOR_FIELDS:
            given[name] = tensor(view)
        elif not name.startswith(MULTI_MODAL_PREFIX):
            extra[name] = tensor(view)
    keys = meta.get("multi_modal_input_keys")
    if keys:
        given["multi_modal_inputs"] = {
            key: tensor(item.tensors[f"{MULTI_MODAL_PREFIX}{key}"]) for key in keys
        }
    return make(extra=extra, **given)


def custom_field(entry: Mapping[str, str]) -> CustomField:
    """The custom field that `custom_field_entry` has described.

    Raises:
        ValueError: Its `data_type` is none of torch's.
    """
    name = entry["data_type"]
    if name not in DTYPE_NAMES:
        raise ValueError(f"custom field of data_type {name!r:.80}; give a torch dtype")
    dtype = getattr(torch, name.removeprefix("torch."))
    return CustomField(entry["source_field"], entry["destination_field"], dtype)
