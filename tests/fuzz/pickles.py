"""Mutations of pickles at the level of opcodes: still a pickle, mostly, and never a harmless one.

Tokens are cut tolerantly: what isn't a known opcode becomes the rest, one token.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Final

_FIXED: Final = {
    0x4B: 1,  # BININT1
    0x4D: 2,  # BININT2
    0x4A: 4,  # BININT
    0x47: 8,  # BINFLOAT
    0x68: 1,  # BINGET
    0x6A: 4,  # LONG_BINGET
    0x71: 1,  # BINPUT
    0x72: 4,  # LONG_BINPUT
    0x80: 1,  # PROTO
    0x82: 1,  # EXT1
    0x83: 2,  # EXT2
    0x84: 4,  # EXT4
    0x95: 8,  # FRAME
}
_SIZED: Final = {
    0x8C: 1,  # SHORT_BINUNICODE
    0x58: 4,  # BINUNICODE
    0x8D: 8,  # BINUNICODE8
    0x43: 1,  # SHORT_BINBYTES
    0x42: 4,  # BINBYTES
    0x8E: 8,  # BINBYTES8
    0x96: 8,  # BYTEARRAY8
    0x54: 4,  # BINSTRING
    0x55: 1,  # SHORT_BINSTRING
    0x8A: 1,  # LONG1
    0x8B: 4,  # LONG4
}
_LINES: Final = {0x49: 1, 0x4C: 1, 0x46: 1, 0x53: 1, 0x56: 1, 0x67: 1, 0x70: 1, 0x50: 1}
_LINES_2: Final = {0x63: 2, 0x69: 2}
_HOSTILE: Final = (
    b"cos\nsystem\n\x8c\x02id\x85R",
    b"\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R",
    b"cbuiltins\neval\n(\x8c\x011tR",
    b"(\x8c\x02idios\nsystem\n",
    b"Ppersistent\n",
    b"NQ",
    b"\x82\x01",
    b"\x83\x01\x02",
    b"\x84\x01\x02\x03\x04",
    b"r\xff\xff\xff\x0f",
    b"q\xff",
    b"j\xff\xff\xff\xff",
    b"h\xff",
    b"I99999999999999999999\n",
    b"L9999999999L\n",
    b"Fnan\n",
    b"S'x'\n",
    b"Vx\\ud800\n",
    b"\x8c\x03\xed\xa0\x80",
    b"\x8a\xff" + b"\xff" * 255,
    b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024,
    b"\x8b\xff\xff\xff\xff",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
    b"X\xff\xff\xff\xff",
    b"\x8e\x00\x00\x00\x00\x00\x00\x00\x80",
    b"\x96\x04\x00\x00\x00\x00\x00\x00\x00abcd",
    b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"G\xff\xef\xff\xff\xff\xff\xff\xff",
    b"\x8f\x94(K\x01K\x02\x90",
    b"(K\x01K\x01\x91",
    b"K\x01K\x02\x86",
    b"NN\x86NN\x86\x86",
    b"}\x94(K\x01Nu",
    b"}NNs",
    b"]\x94a",
    b"\x8c\x16numpy._core.multiarray\x8c\x06scalar\x93\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02f8"
    b"\x89\x88\x87R(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbC\x08abcdefgh\x86R",
    b"\x8c\x15numpy.core.multiarray\x8c\x06scalar\x93\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02U2"
    b"\x89\x88\x87RC\x08x\x00\x00\x00y\x00\x00\x00\x86R",
    b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02O8\x89\x88\x87R",
    # Opcodes without an argument, each alone.
    *struct.unpack("23c", b"(tueas012Rb\x81\x92\x93\x97\x98.N\x88}])\x8f"),
)
"""What to put among the opcodes: calls, references to elsewhere, lies about sizes, odd values."""
_KEYS: Final = (
    b"version num_items items eid batch task run step suffix reward truncate_status info metrics "
    b"prompt_length messages custom_fields data_type multi_modal_input_keys model_version "
    b"version_start version_end priority values ref_logprobs baseline_reward prompt_truncated"
).split()


@lru_cache(2048)
def tokens(data: bytes) -> tuple[bytes, ...]:
    """Cut a pickle into opcodes with their arguments; joined, they are the pickle."""
    found = []
    pos, end = 0, len(data)
    while pos < end:
        op = data[pos]
        size = 1 + _FIXED.get(op, 0)
        if op in _SIZED:
            width = _SIZED[op]
            size += width + int.from_bytes(data[pos + 1 : pos + 1 + width], "little")
        elif op in _LINES or op in _LINES_2:
            stop = data.find(b"\n", pos)
            stop = data.find(b"\n", stop + 1) if op in _LINES_2 and stop >= 0 else stop
            size = stop + 1 - pos if stop >= 0 else end - pos
        found.append(data[pos : pos + size])
        pos += size
    return tuple(found)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A pickle that differs from this one in a few opcodes."""
    found = list(tokens(data))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if not found:
            found = [b"\x80\x05", b"."]
        rng.choice(_MUTATIONS)(found, rng)
    return b"".join(found)


def _place(found: list[bytes], rng: random.Random) -> int:
    return rng.randrange(len(found))


def _insert(found: list[bytes], rng: random.Random) -> None:
    found.insert(_place(found, rng), rng.choice(_HOSTILE))


def _replace(found: list[bytes], rng: random.Random) -> None:
    found[_place(found, rng)] = rng.choice(_HOSTILE)


def _delete(found: list[bytes], rng: random.Random) -> None:
    start = _place(found, rng)
    del found[start : start + rng.choice((1, 1, 2, 5))]


def _duplicate(found: list[bytes], rng: random.Random) -> None:
    start = _place(found, rng)
    piece = found[start : start + rng.choice((1, 2, 4, 20))]
    at = _place(found, rng)
    found[at:at] = piece * (200 if rng.random() < 0.01 else rng.choice((1, 1, 2, 5)))


def _swap(found: list[bytes], rng: random.Random) -> None:
    a, b = _place(found, rng), _place(found, rng)
    found[a], found[b] = found[b], found[a]


def _value_of_key(found: list[bytes], rng: random.Random) -> None:
    """Put something odd where a known key's value is."""
    wanted = rng.choice(_KEYS)
    places = [i for i, token in enumerate(found) if wanted in token and i + 2 < len(found)]
    if places:
        at = rng.choice(places) + 1
        at += found[at] == b"\x94"
        found[at] = rng.choice(_HOSTILE)


def _other_key(found: list[bytes], rng: random.Random) -> None:
    places = [i for i, token in enumerate(found) if token[:1] == b"\x8c"]
    if places:
        text = rng.choice(_KEYS)
        found[rng.choice(places)] = b"\x8c" + bytes([len(text)]) + text


def _argument(found: list[bytes], rng: random.Random) -> None:
    """Change an opcode's argument, and nothing else."""
    at = _place(found, rng)
    token = bytearray(found[at])
    if len(token) > 1:
        place = rng.randrange(1, len(token))
        token[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        found[at] = bytes(token)


def _memo(found: list[bytes], rng: random.Random) -> None:
    """Fetch what was kept, in place of a value."""
    index = rng.choice((0, 1, 2, 3, 5, 8, rng.randrange(256)))
    found[_place(found, rng)] = rng.choice((bytes([0x68, index]), b"j" + struct.pack("<I", index)))


def _nest(found: list[bytes], rng: random.Random) -> None:
    depth = 5000 if rng.random() < 0.02 else rng.choice((2, 3, 60, 64, 65, 100))
    opening, closing = rng.choice(
        ((b"]", b"a"), (b"](", b"e"), (b"}N", b"s"), (b"(", b"t"), (b"", b"\x85"), (b"(", b"\x91"))
    )
    found.insert(_place(found, rng), opening * depth + b"N" + closing * depth)


def _laugh(found: list[bytes], rng: random.Random) -> None:
    """A list of the list before, over and over: small to store, endless to walk."""
    width, depth = rng.choice((2, 4, 9)), rng.choice((2, 3, 6, 20))
    base = rng.choice((0, sum(token == b"\x94" for token in found)))
    pieces = [b"]\x94(", b"K\x01" * width, b"e"]
    for level in range(depth):
        index = base + level
        fetch = b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        pieces += [b"]\x94(", fetch * width, b"e"]
    found.insert(_place(found, rng), b"".join(pieces))


def _long_text(found: list[bytes], rng: random.Random) -> None:
    size = 30_000 if rng.random() < 0.02 else rng.choice((200, 255, 256, 4097))
    text = rng.choice((b"x", "é".encode(), b"\xed\xa0\x80", b"\0")) * size
    uses = b"h\x00" * (2000 if rng.random() < 0.02 else rng.choice((0, 1, 20)))
    found.insert(_place(found, rng), b"X" + struct.pack("<I", len(text)) + text + b"\x94" + uses)


_MUTATIONS: Final[tuple[Callable[[list[bytes], random.Random], None], ...]] = (
    *(_insert, _insert, _replace, _replace, _replace, _delete, _delete, _duplicate, _swap),
    *(_value_of_key, _value_of_key, _value_of_key, _other_key, _argument, _argument, _argument),
    *(_memo, _memo, _nest, _laugh, _long_text),
)
