"""Mutations of safetensors files: headers that lie, overlap, repeat themselves or go on for ever."""

from __future__ import annotations

import json
import random
import struct
from functools import lru_cache
from typing import Any, Final

_SIZES: Final[tuple[Any, ...]] = (
    0, 1, 2, 3, 4, 7, 8, 13, 16, 64, 255, 2**16, 2**31, 2**32, 2**48, 2**53, 2**63 - 1, 2**63,
    2**64, 10**30, -1, -(2**63), 1.0, 1e300, True, None, "1", [], {}, [1],
)  # fmt: skip
_DTYPES: Final[tuple[Any, ...]] = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0",
    "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL", "F4", "i32", "", "F32\0", "OBJECT", None, 7, ["F32"],
)  # fmt: skip
_NAMES: Final = (
    "0:tokens", "0:logprobs", "0:action_mask", "0:chosen", "0:rejected", "0:values", "0:versions",
    "0:advantages", "0:multi_modal_inputs:a", "0:multi_modal_inputs:", "1:tokens", "00:tokens",
    "-1:tokens", "99999999999999999999:tokens", ":", "", "0", "0:", "0:\0", "\ud800", "0:\ud83d",
    "__metadata__", "0:a/b", '0:"', "0:\\", "0:é", "format", "fields/tokens", "offsets/tokens",
    "fields.1/tokens", "scalars/tokens", "present/tokens", "columns/reward", "bytes/uid",
    "byte_offsets/meta", "fields.99999/x", "columns/", "x" * 300,
)  # fmt: skip
_NUMBERS: Final = (
    0, 1, 2, 3, 5, 100, 65_535, 65_536, 65_537, 2**31, 2**62, 2**63 - 1, -1, -(2**63),
)  # fmt: skip

Header = list[tuple[str, Any]]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file that differs from this one, mostly in its header."""
    size = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.25:
        return _lie(text, body, rng)
    if rng.random() < 0.35 and body:
        return data[: 8 + size] + _numbers(body, rng)
    header = list(_header(text))
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not header or rng.random() < 3 / 11:
            body = _add(header, body, rng)
        else:
            rng.choice(_MUTATIONS)(header, rng)
    return _write(header, body, rng)


@lru_cache(2048)
def _header(text: bytes) -> tuple[tuple[str, Any], ...]:
    """Names and entries; nothing of what isn't a table."""
    try:
        header = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(header, list) or not all(isinstance(entry, tuple) for entry in header):
        return ()
    return tuple(header)


def _write(header: Header, body: bytes, rng: random.Random) -> bytes:
    compact = rng.random() < 0.8
    separators = (",", ":") if compact else (", ", ": ")
    ascii_only = rng.random() < 0.2
    entries = []
    for name, entry in header:
        value = dict(entry) if _is_pairs(entry) else entry
        quoted = json.dumps(name, ensure_ascii=ascii_only or not name.isprintable())
        shown = json.dumps(value, separators=separators, ensure_ascii=True)
        entries.append(quoted + separators[1] + shown)
    text = "{" + separators[0].join(entries) + "}"
    raw = text.encode("utf-8", "surrogatepass")
    raw = raw.ljust(-(-len(raw) // 8) * 8) if rng.random() < 0.9 else raw
    return struct.pack("<Q", len(raw)) + raw + body


def _is_pairs(entry: Any) -> bool:
    return isinstance(entry, list) and all(isinstance(pair, tuple) for pair in entry)


def _lie(text: bytes, body: bytes, rng: random.Random) -> bytes:
    """The sizes or the text itself are wrong."""
    size = rng.choice((len(text), len(text) + 1, len(text) - 8, 0, 2**23, 2**63, 2**64 - 1))
    kind = rng.randrange(5)
    if kind == 0:
        depth = 5000 if rng.random() < 0.02 else rng.choice((3, 10, 100))
        text = rng.choice((b"[", b'{"a":')) * depth
    elif kind == 1:
        text = text.replace(b"}", b"}" + rng.choice((b" ", b"\t", b"\0", b"}", b",{}")), 1)
    elif kind == 2:
        text = text.replace(b'"', rng.choice((b'\\"', b"'", b'""', b"")), rng.choice((1, 3)))
    elif kind == 3:
        text = text.replace(b"[", b"[" + rng.choice((b"9" * 4400 + b",", b"0,", b"-", b"NaN,")), 1)
    else:
        body = body[: rng.randrange(len(body) + 1)]
    size = len(text) if kind < 4 and rng.random() < 0.8 else size % 2**64
    return struct.pack("<Q", size) + text + body


def _numbers(body: bytes, rng: random.Random) -> bytes:
    """Numbers among the data: offsets, counts, versions."""
    changed = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(0, len(changed), 8)
        packed = struct.pack("<q", rng.choice(_NUMBERS))
        changed[at : at + 8] = packed[: len(changed) - at]
    return bytes(changed)


def _some_entry(header: Header, rng: random.Random) -> tuple[int, str, dict[str, Any]]:
    """Where an entry is, its name, and what it says."""
    at = rng.randrange(len(header))
    name, entry = header[at]
    return at, name, dict(entry) if _is_pairs(entry) else {}


def _field(header: Header, rng: random.Random) -> None:
    at, name, fields = _some_entry(header, rng)
    key = rng.choice(("dtype", "shape", "shape", "data_offsets", "data_offsets", "extra"))
    if key == "dtype":
        fields[key] = rng.choice(_DTYPES)
    else:
        fields[key] = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 65)))]
    if rng.random() < 0.1:
        fields.pop(rng.choice(sorted(fields)))
    header[at] = (name, list(fields.items()))


def _shape(header: Header, rng: random.Random) -> None:
    """Another shape of as many elements, or an empty one of vast sizes."""
    at, name, fields = _some_entry(header, rng)
    shape = fields.get("shape")
    if isinstance(shape, list):
        fields["shape"] = rng.choice(
            ([1, *shape], [*shape, 1], [*shape, 0], [], [2**62, 0], [0, 2**47], [1] * 64)
        )
        header[at] = (name, list(fields.items()))


def _rename(header: Header, rng: random.Random) -> None:
    at = rng.randrange(len(header))
    header[at] = (rng.choice(_NAMES), header[at][1])


def _repeat(header: Header, rng: random.Random) -> None:
    header.insert(rng.randrange(len(header) + 1), rng.choice(header))


def _remove(header: Header, rng: random.Random) -> None:
    del header[rng.randrange(len(header))]


def _reorder(header: Header, rng: random.Random) -> None:
    rng.shuffle(header)


def _add(header: Header, body: bytes, rng: random.Random) -> bytes:
    """One more tensor at the end, with or without its data; or a great many empty ones."""
    begin = len(body)
    if rng.random() < 1 / 3:
        entry = [("dtype", "U8"), ("shape", [0]), ("data_offsets", [begin, begin])]
        count = 700 if rng.random() < 0.01 else rng.choice((2, 5, 20))
        header.extend((f"0:{number}", entry) for number in range(count))
        return body
    size = rng.choice((0, 0, 4, 8, 16, 13))
    dtype, item_bytes = rng.choice((("U8", 1), ("I32", 4), ("I64", 8), ("F32", 4), ("BOOL", 1)))
    shape = [size // item_bytes] if rng.random() < 0.8 else [size // item_bytes, 1]
    entry = [("dtype", dtype), ("shape", shape), ("data_offsets", [begin, begin + size])]
    header.append((rng.choice(_NAMES), entry))
    return body + rng.randbytes(size)


_MUTATIONS: Final = (_field, _field, _shape, _rename, _rename, _repeat, _remove, _reorder)
"""Of a header that has an entry."""
