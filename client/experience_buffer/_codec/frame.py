"""The outermost layer of TRXP: magic, version, and the lengths of metadata and tensors."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from typing import Any, Final

from experience_buffer._codec import memory, safetensors
from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.metadata import has_few_values
from experience_buffer._codec.pickle_reader import load
from experience_buffer._codec.safetensors import TensorView
from experience_buffer.errors import TrxpError

MAGIC: Final = b"TRXP"
VERSION: Final = 1
KEYS: Final = ("version", "num_items", "items")
"""Keys of the metadata's outermost dict, in wire order."""
_FRAME: Final = struct.Struct("<4sBQQ")
_LENGTH: Final = struct.Struct("<Q")
"""Of the tensor section's header, with which it begins."""
FRAME_BYTES: Final = _FRAME.size
"""What precedes the metadata."""
_ALIGNMENT_BYTES: Final = 16


def split_frame(
    payload: bytes | bytearray | memoryview, *, limits: Limits
) -> tuple[memoryview, memoryview]:
    """Return the metadata and the tensor section, both views on the payload.

    Raises:
        TrxpError: The payload isn't TRXP version 1, is cut short, or bytes follow it.
    """
    view = memoryview(payload)
    boundary = boundary_of(view, limits)
    if not boundary:
        raise _frame_error(view, limits)
    return view[FRAME_BYTES:boundary], view[boundary:]


def boundary_of(payload: bytes | bytearray | memoryview, limits: Limits) -> int:
    """Where the metadata ends and the tensor section begins; 0 if `split_frame` refuses it."""
    if len(payload) < FRAME_BYTES:
        return 0
    magic, version, metadata_bytes, tensor_bytes = _FRAME.unpack_from(payload)
    is_sound = (
        magic == MAGIC
        and version == VERSION
        and metadata_bytes <= limits.max_metadata_bytes
        and FRAME_BYTES + metadata_bytes + tensor_bytes == len(payload)
    )
    return FRAME_BYTES + metadata_bytes if is_sound else 0


def head_of(payload: memoryview, limits: Limits) -> memoryview:
    """A copy of what precedes the tensors' bytes, for a payload that others can change meanwhile.

    What is copied says how long it should be, so whoever reads it has to compare. It is shorter where the
    limits, or the payload's end, don't allow as much.
    """
    # Each length is read once, and only says how much to copy.
    end = FRAME_BYTES
    if len(payload) >= end:
        _, _, metadata_bytes, _ = _FRAME.unpack_from(payload)
        end += min(metadata_bytes, limits.max_metadata_bytes) + _LENGTH.size
    if len(payload) >= end:
        (header_bytes,) = _LENGTH.unpack_from(payload, end - _LENGTH.size)
        end += min(header_bytes, limits.max_header_bytes)
    return memoryview(bytes(payload[:end]))


def aligned(payload: bytes | bytearray | memoryview, limits: Limits) -> memoryview:
    """A writable copy in which the tensors' bytes, sorted by element size, are aligned.

    So tensors can be made on it. One whose frame isn't sound is copied as it is.
    """
    whole = memoryview(payload)
    boundary = boundary_of(whole, limits)
    header_bytes = int.from_bytes(whole[boundary : boundary + _LENGTH.size], "little")
    padding = -(boundary + _LENGTH.size + header_bytes) % _ALIGNMENT_BYTES
    return memoryview(memory.joined((bytes(padding), whole)))[padding:]


def _frame_error(view: memoryview, limits: Limits) -> TrxpError:
    """What is wrong with a frame that isn't sound."""
    if bytes(view[:4]) != MAGIC:
        return trxp_error(
            "the payload doesn't begin with `TRXP`; legacy pickles are never loaded, so write it "
            "again with Experience.serialize()",
            where="frame",
        )
    if len(view) < FRAME_BYTES:
        return trxp_error(
            f"{len(view)} bytes are too few for a frame of {FRAME_BYTES}", where="frame"
        )
    _, version, metadata_bytes, tensor_bytes = _FRAME.unpack_from(view)
    if version != VERSION:
        return trxp_error(f"TRXP version {version}; this reader knows {VERSION}", where="frame")
    if metadata_bytes > limits.max_metadata_bytes:
        return trxp_error(
            f"metadata of {metadata_bytes} bytes exceeds the limit of "
            f"{limits.max_metadata_bytes} (max_metadata_bytes)",
            where="frame",
        )
    num_bytes = FRAME_BYTES + metadata_bytes + tensor_bytes
    return trxp_error(
        f"the lengths add up to {num_bytes} bytes, but the payload has {len(view)}; send one "
        "payload at a time, whole",
        where="frame",
    )


def join_frame(
    metadata: list[Any] | memoryview,
    tensors: Iterable[tuple[str, TensorView]],
    *,
    keys: tuple[str, ...] = KEYS,
) -> bytes:
    """Write a payload of tensors with their names (`index:field`); see `frame_pieces`.

    Raises:
        TrxpError: As `frame_pieces`, or a tensor's name isn't valid Unicode.
    """
    return b"".join(frame_pieces(metadata, safetensors.write(tensors), keys=keys))


def frame_pieces(
    metadata: list[Any] | memoryview,
    section: list[bytes | memoryview],
    *,
    keys: tuple[str, ...] = KEYS,
) -> list[bytes | memoryview]:
    """Write a payload, as pieces to be joined.

    Args:
        metadata: The items' metadata, checked to be plain data; or pickled already.
        section: The tensors, as the pieces of their file.
        keys: The metadata's own keys, as the very objects the items may share.

    Raises:
        TrxpError: The metadata would take more opcodes than readers take by default.
    """
    if isinstance(metadata, list):
        version, num_items, items = keys
        written = pickle.dumps(
            {version: VERSION, num_items: len(metadata), items: metadata}, protocol=5
        )
        if len(written) > DEFAULT_LIMITS.max_nodes and not has_few_values(metadata):
            # No opcode takes less than a byte, so fewer bytes hold no more of them than readers take.
            load(written, limits=DEFAULT_LIMITS)
        pickled: bytes | memoryview = written
    else:
        pickled = metadata
    section_bytes = sum(map(len, section))
    return [_FRAME.pack(MAGIC, VERSION, len(pickled), section_bytes), pickled, *section]
