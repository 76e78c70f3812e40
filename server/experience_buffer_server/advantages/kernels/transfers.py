"""Arrays to a torch device and back, each time in one piece."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Array = NDArray[Any]
_ALIGNMENT_BYTES = 8


def upload(arrays: Mapping[str, _Array], device: torch.device) -> dict[str, Tensor]:
    """Move arrays to a device as one buffer, pinned where that helps; dtypes stay."""
    starts, size = [], 0
    for array in arrays.values():
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = staged.numpy()
    for start, array in zip(starts, arrays.values(), strict=True):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return {
        name: moved[start : start + array.nbytes].view(_torch_dtype(array.dtype))
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = torch.from_numpy(np.empty(0, dtype=dtype)).dtype
    return found


def download(tensor: Tensor) -> _Array:
    """Move a tensor to the host, through pinned memory where that helps."""
    if not tensor.is_cuda:
        return tensor.cpu().numpy()
    received = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    received.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return received.numpy()
