"""Which mutation an input gets: of its bytes, of its frame, or of what is in the frame."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from tests.fuzz import pickles, tables

Mutation = Callable[[bytes, random.Random], bytes]

_HEADER: Final = 21
_LENGTHS: Final = (0, 1, 20, 21, 2**16, 2**26, 2**26 + 1, 2**32, 2**63, 2**64 - 1)


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, remove or repeat a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at:at] = rng.randbytes(size)
            case 2:
                del changed[at : at + size]
            case _:
                start = rng.randrange(len(changed) + 1)
                changed[at:at] = changed[start : start + size]
    return bytes(changed)


def of_choices(data: bytes, rng: random.Random) -> bytes:
    """Other numbers to choose by, two bytes each; what is chosen has little to do with its neighbours."""
    return rng.randbytes(2 * rng.randint(4, 16))


def of_frame(data: bytes, rng: random.Random) -> bytes:
    """Mutate one of a payload's parts, and the lengths so that they fit, or so that they don't."""
    if len(data) < _HEADER or data[:4] != b"TRXP":
        return of_bytes(data, rng)
    (num_metadata,) = struct.unpack_from("<Q", data, 5)
    metadata = data[_HEADER : _HEADER + num_metadata]
    section = data[_HEADER + num_metadata :]
    choice = rng.random()
    if choice < 0.5:
        metadata = pickles.mutate(metadata, rng)
    elif choice < 0.85:
        section = tables.mutate(section, rng)
    elif choice < 0.9:
        metadata, section = pickles.mutate(metadata, rng), tables.mutate(section, rng)
    else:
        return _lie(data, rng)
    lengths = struct.pack("<QQ", len(metadata), len(section))
    return data[:5] + lengths + metadata + section


def _lie(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    match rng.randrange(4):
        case 0:
            struct.pack_into("<Q", changed, 5, rng.choice(_LENGTHS))
        case 1:
            struct.pack_into("<Q", changed, 13, rng.choice(_LENGTHS))
        case 2:
            changed[4] = rng.randrange(256)
        case _:
            del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def mostly(structured: Mutation) -> Mutation:
    """A structured mutation, and now and then one of bytes."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return (of_bytes if rng.random() < 0.15 else structured)(data, rng)

    return mutate
