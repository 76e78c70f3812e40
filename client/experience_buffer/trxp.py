"""TRXP, the wire format of experiences: read, split, merge, add tensors, encode and decode.

TRXP v1 is what Trinity-RFT 0.6.0 writes: a frame, metadata as a pickle of plain data, tensors in
the safetensors format. Payloads are read without unpickling, and neither torch nor NumPy is needed.
All functions are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from experience_buffer import _payloads
from experience_buffer._codec.item import Item
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.payload import Buffer, merge, read, split, with_tensors
from experience_buffer._codec.safetensors import TensorView
from experience_buffer.errors import TrxpError
from experience_buffer.experience import Experience

__all__ = [
    "DEFAULT_LIMITS",
    "Item",
    "Limits",
    "TensorView",
    "TrxpError",
    "decode",
    "encode",
    "merge",
    "read",
    "split",
    "with_tensors",
]
__dir__ = __all__.copy


def encode(experiences: Sequence[Experience]) -> bytes:
    """Write experiences as one payload, byte for byte what Trinity-RFT's class writes.

    NumPy scalars in the metadata are written as Python numbers; everything else that isn't plain
    data is refused, where Trinity-RFT's class would pickle it.

    Args:
        experiences: Any number.

    Raises:
        TrxpError: An experience holds what TRXP can't, or what no reader may load; `item` is its
            index and the text names the field.
    """
    return _payloads.encode(experiences, Experience)


def decode(payload: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> list[Experience]:
    """Make experiences of a payload.

    The payload is copied once; all tensors are views on that copy, which lives as long as any of
    them, so `clone()` what is to be kept for long.

    Args:
        payload: Of any number of experiences.
        limits: Bounds on what a payload may ask of its reader.

    Raises:
        TrxpError: The payload, or any of its experiences, is damaged.
    """
    return _payloads.decode(payload, Experience, limits=limits)
