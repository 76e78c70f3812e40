"""Tensors as dense memory, and dense memory as tensors. Imports torch.

Only what torch says is plain memory is read by its address. What has none of its own, such as a
tensor of another class or one whose storage was freed, is first made plain, or refused.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import torch
from torch import Tensor

from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.safetensors import ITEM_BYTES, MAX_DIMENSIONS, TensorView, too_large
from experience_buffer._dense.rules import NAMES, RANGES

DTYPES: Final = {
    code: getattr(torch, name)
    for code, name in NAMES.items()
    if hasattr(torch, name)  # float8_e8m0fnu came with torch 2.7.
}
"""By code."""
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_FINISH: Final = "call full_tensor() on every rank, and push on one"


class _Memory(ctypes.Array[ctypes.c_ubyte]):
    """All memory from an address on; views of it keep its owner alive."""

    _type_ = ctypes.c_ubyte
    _length_ = sys.maxsize
    __slots__ = ("owner",)
    owner: Tensor


def tensor_view(tensor: Tensor) -> TensorView:
    """Copy a tensor's elements into a view, from any device.

    Raises:
        TypeError: Its elements can't be read, or it has a dtype or shape that the format hasn't.
    """
    view = memory_view(tensor)
    return TensorView(view.dtype, tuple(view.shape), memoryview(bytes(view.data)))


def memory_view(tensor: Tensor) -> TensorView:
    """Do what `tensor_view` does, without a copy where the elements lie in memory as written."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a {type(tensor).__name__}, not a tensor")
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"a tensor of {tensor.dtype}; send a dense one of a common dtype")
    owner = dense(tensor)
    num_bytes = owner.nbytes
    if (not num_bytes or owner.dim() > MAX_DIMENSIONS) and (reason := too_large(owner.shape)):
        raise TypeError(reason)
    memory = _Memory.from_address(owner.data_ptr())
    memory.owner = owner
    return TensorView(code, owner.size(), memoryview(memory)[:num_bytes])


def tensor_of(view: TensorView) -> Tensor:
    """Make a tensor on a view's memory; copied only if that is misaligned, or can't be written to."""
    dtype = DTYPES.get(view.dtype)
    if dtype is None:
        raise trxp_error(f"this version of torch has no {view.dtype}", where="tensors")
    if not len(view.data):
        return torch.empty(view.shape, dtype=dtype, device="cpu")
    data = bytearray(view.data) if view.data.readonly else view.data
    flat = torch.frombuffer(data, dtype=dtype)
    if flat.data_ptr() % ITEM_BYTES[view.dtype]:
        flat = flat.clone()
    return flat if len(view.shape) == 1 else flat.view(view.shape)


def is_of_integers(tensor: Tensor) -> bool:
    """Whether a tensor holds whole numbers, by its dtype."""
    return _CODES.get(tensor.dtype) in RANGES


def numbers_of(tensor: Tensor) -> list[Any]:
    """The real numbers of a tensor, flat; none where they can't be read."""
    if tensor.is_complex():
        return []
    try:
        values: list[Any] = dense(tensor).flatten().tolist()
    except (TypeError, RuntimeError):  # RuntimeError: of a dtype that Python hasn't.
        return []
    return values


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


def dense(tensor: Tensor) -> Tensor:
    """A tensor of plain memory with these elements, row by row; the same one if it is that.

    Raises:
        TypeError: They can't be read.
    """
    tensor = plain(tensor)
    try:
        if not tensor.is_cpu:
            tensor = tensor.cpu()
            _check_storage(tensor)
        if tensor.is_complex():
            tensor = tensor.resolve_conj()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        found = tensor.contiguous()
        if found is not tensor:
            # Where a mode of torch's is on, a new one may be of any kind.
            if type(found) is not Tensor:
                raise TypeError(f"a tensor that becomes a {type(found).__name__} when it is copied")
            _check_storage(found)
    except RuntimeError as error:
        raise _unreadable(error) from None
    return found


def plain(tensor: Tensor) -> Tensor:
    """A tensor of torch's own class with these elements, where they are; the same one if it is that.

    Raises:
        TypeError: They can't be read.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"a tensor of layout {layout}; send a dense one, such as to_dense() makes")
    if tensor.is_meta:
        raise TypeError("a tensor on the device meta, which has no elements; send one that has")
    try:
        if tensor.is_cpu or tensor.is_cuda:
            _check_storage(tensor)
    except RuntimeError as error:
        raise _unreadable(error) from None
    return tensor


def _unreadable(error: RuntimeError) -> TypeError:
    reason = str(error).partition("\n")[0]
    return TypeError(f"a tensor whose elements can't be read here ({reason:.120})")


def _check_storage(tensor: Tensor) -> None:
    """Check that the memory is there, all of what the shape speaks of.

    Raises:
        TypeError: It isn't.
        RuntimeError: Torch knows of no memory.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        num_elements = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
    num_bytes = (tensor.storage_offset() + num_elements) * tensor.element_size()
    has_bytes = tensor.untyped_storage().nbytes()
    if has_bytes < num_bytes or not tensor.data_ptr():
        raise TypeError(
            f"a tensor of {num_bytes} bytes, of which its storage has "
            f"{min(has_bytes, num_bytes) if tensor.data_ptr() else 0}: it was freed, or never "
            "filled; send its elements while it has them"
        )


def _unwrapped(tensor: Tensor) -> Tensor:
    """What a tensor of another class is as a plain one.

    Raises:
        TypeError: Only its class knows.
    """
    kind: Any = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"a {kind.__name__}, which has no elements yet")
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        # It has a tensor's memory, and methods of its own.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(Tensor)
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return plain(tensor.wait())
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise TypeError(f"a DTensor, whose elements lie on several ranks; {_FINISH}")
        return plain(tensor.to_local())
    raise TypeError(
        f"a {kind.__name__}, whose elements only its class can read; send a plain tensor of them"
    )
