"""Payloads that ask for far more than they are: each small, each aimed at one place of the codec.

Written by hand, because chance hardly finds them: a text that thousands of values share, an object
that holds itself exponentially often, a key that is long to compare. They are seeds of the fuzzer
and are replayed by `make test`.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

PROTO: Final = b"\x80\x05"
STOP: Final = b"."
_EMPTY_TABLE: Final = struct.pack("<Q", 2) + b"{}"


def frame(metadata: bytes, section: bytes = _EMPTY_TABLE) -> bytes:
    """A TRXP payload of these two parts, whatever they are."""
    return b"TRXP\x01" + struct.pack("<QQ", len(metadata), len(section)) + metadata + section


def top(items: object, **changes: Any) -> bytes:
    """Metadata as Python's own pickler writes it."""
    count = len(items) if isinstance(items, list) else 0
    return pickle.dumps({"version": 1, "num_items": count, "items": items} | changes, 5)


def table(num_items: int) -> bytes:
    """A tensor section with four tokens for each of so many experiences."""
    ends = range(16, 16 * num_items + 1, 16)
    entries = [{"dtype": "I32", "shape": [4], "data_offsets": [end - 16, end]} for end in ends]
    header = {f"{index}:tokens": entry for index, entry in enumerate(entries)}
    return safetensors(header, bytes(16 * num_items))


def safetensors(header: dict[str, Any], data: bytes, *, spelling: Any = (",", ":")) -> bytes:
    """A safetensors file of this header and these data, whatever they are."""
    text = json.dumps(header, separators=spelling, ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text + data


def meta(**changes: Any) -> dict[str, Any]:
    """Metadata of one sound experience of four tokens."""
    eid = {"batch": 1, "task": 2, "run": 3, "step": 5, "suffix": "a"}
    found = {"eid": eid, "reward": 0.5, "info": {}, "metrics": {}, "prompt_length": 1}
    return found | {"custom_fields": [], "multi_modal_input_keys": []} | changes


def laughs(depth: int = 40, width: int = 4, innermost: object = "ha") -> Any:
    """A list of lists of ..., all shared: reached `width ** depth` times, stored `depth` times."""
    value: Any = [innermost] * width
    for _ in range(depth - 1):
        value = [value] * width
    return value


def _deep_version(depth: int) -> bytes:
    """Deeper than Python's own pickler goes."""
    version = b"]" * depth + b"a" * (depth - 1)
    return PROTO + b"}(\x8c\x07version" + version + b"\x8c\x09num_itemsK\0\x8c\x05items]u" + STOP


def _within(depth: int, key: str, value: object) -> object:
    """A value in a dict in a dict ..., each under this key."""
    for _ in range(depth):
        value = {key: value}
    return value


def one(**changes: Any) -> bytes:
    """A payload of one experience with such metadata."""
    return frame(top([meta(**changes)]), table(1))


def many(num_items: int, shared: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """Experiences that differ in their run alone and share all the rest."""
    found = meta(**changes)
    eid = found["eid"] | (shared or {})
    metas = [found | {"eid": eid | {"run": run}} for run in range(num_items)]
    return frame(top(metas), table(num_items))


def _text(size: int) -> bytes:
    """Opcodes that push a text and remember it."""
    return b"X" + struct.pack("<I", size) + b"x" * size + b"\x94"


def _numpy_texts(code: str, size: int, count: int) -> bytes:
    """NumPy scalars of one type and one value, made over and over."""
    function = b"\x8c\x16numpy._core.multiarray\x8c\x06scalar\x93\x94"
    dtype = b"\x8c\x05numpy\x8c\x05dtype\x93\x8c" + bytes([len(code)]) + code.encode()
    dtype += b"\x89\x88\x87R\x94"
    data = b"B" + struct.pack("<I", size) + b"x\0\0\0" * (size // 4) + b"\x94"
    call = b"h\x00h\x01h\x02\x86R"
    return PROTO + b"](" + function + dtype + data + call * count + b"e" + STOP


def _many_globals(size: int, count: int) -> bytes:
    return PROTO + b"](" + _text(size) + b"h\x00h\x00\x93" * count + b"e" + STOP


def _key_set_again(size: int, count: int) -> bytes:
    """One dict in which an equal but not identical key is set over and over."""
    pairs = b"h\x01Ns" * count
    return PROTO + b"](" + _text(size) + _text(size) + b"}h\x00Ns" + pairs + b"e" + STOP


def _long_tuple_keys(size: int, count: int) -> bytes:
    members = b"K\x01" * size
    return PROTO + b"](" + b"(" + members + b"t\x94}" + b"h\x00Ns" * count + b"e" + STOP


def _nested_json(depth: int) -> bytes:
    text = b'{"0:tokens":' + b"[" * depth + b"]" * depth + b"}"
    return frame(top([meta()]), struct.pack("<Q", len(text)) + text)


BOMBS: Final[dict[str, Callable[[], bytes]]] = {
    "version_laughs": lambda: frame(top([], version=laughs())),
    "version_deep": lambda: frame(_deep_version(5000)),
    "numpy_texts": lambda: frame(_numpy_texts("U10000", 40_000, 3000)),
    "num_items_laughs": lambda: frame(top([], num_items=laughs())),
    "num_items_text": lambda: frame(top([], num_items=laughs(8, 6, "x" * 30_000))),
    "info_laughs": lambda: one(info={"a": laughs()}),
    "info_almost_too_large": lambda: one(info={"a": laughs(9, 4)}),
    "shared_by_many_values": lambda: one(info={"a": [list(range(900))] * 900}),
    "model_version_laughs": lambda: one(info={"model_version": laughs(6, 5, "x" * 50_000)}),
    "priority_laughs": lambda: one(info={"priority": laughs(6, 5, "x" * 50_000)}),
    "multi_modal_keys": lambda: one(multi_modal_input_keys=["x" * 40_000] * 12_000),
    "long_key_in_error": lambda: many(60, info={"x" * 30_000: {"y" * 20_000: object}}),
    "long_path_in_error": lambda: one(info=_within(60, "\udc80" * 80, object)),
    "text_shared_by_items": lambda: many(300, prompt_text="x" * 300_000),
    "long_uids": lambda: many(300, {"batch": "x" * 300_000}),
    "many_globals": lambda: frame(_many_globals(30_000, 6000)),
    "key_set_again": lambda: frame(_key_set_again(30_000, 15_000)),
    "long_tuple_keys": lambda: frame(_long_tuple_keys(10_000, 5000)),
    "nested_json": lambda: _nested_json(20_000),
}
"""Makers by name; all are below 700 KB."""
