"""The elements of arrays and tensors: who reads them one by one asks here first whether that can be.

Torch and NumPy are imported by whoever has made one, never by importing this module.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def is_array(value: Any) -> TypeGuard[NDArray[Any]]:
    """Whether it is an array of NumPy's; where NumPy isn't loaded, nothing is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether it is torch's; where torch isn't loaded, nothing is."""
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class is not None and isinstance(value, tensor_class)


def checked(value: Any) -> Any:
    """The same, or of a tensor a plain one: `item()` and `tolist()` give its elements.

    Torch's own read memory that was freed, and what a class keeps elsewhere.

    Raises:
        TypeError: The elements can't be read; the text says what it is.
    """
    if is_tensor(value):
        return tensors().dense(value)
    if is_array(value):
        import numpy as np

        if np.ma.is_masked(value):
            raise TypeError("masked; give one without masked elements")
    return value


@cache
def tensors() -> ModuleType:
    """What handles tensors; imported where there is one."""
    from experience_buffer._dense import tensors

    return tensors
