"""What the tests of packed batches are made of."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from experience_buffer import trxp
from experience_buffer._codec.frame import join_frame
from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView
from experience_buffer.eid import EID
from experience_buffer.packed import PackedBatch, PackedRow, pack

DATA = Path(__file__).parents[3] / "data" / "trxp"
BROKEN = ("numpy_arrays", "python_types_in_info")
SINGLES = {
    f"{path.stem}[{index}]": single
    for path in sorted(DATA.glob("*.bin"))
    if not path.stem.startswith(("neg_", "legacy_")) and path.stem not in BROKEN
    for index, single in enumerate(trxp.split(path.read_bytes())[:5])
}
"""Payloads of one experience that Trinity-RFT's class wrote."""


def view(dtype: str, shape: tuple[int, ...], seed: int = 0) -> TensorView:
    """A tensor of arbitrary bytes; of zeros and ones if it's bool."""
    num_bytes = prod(shape) * ITEM_BYTES[dtype]
    top = 2 if dtype == "BOOL" else 256
    data = bytes((seed * 31 + 7 * i + i // 5) % top for i in range(num_bytes))
    return TensorView(dtype, shape, memoryview(data))


def meta(eid: EID) -> dict[str, Any]:
    """Metadata of an experience, as its producer writes it."""
    return {
        "eid": eid.to_dict(),
        "reward": 0.5,
        "truncate_status": None,
        "info": {},
        "metrics": {},
        "prompt_length": 1,
        "response_text": None,
        "prompt_text": None,
        "messages": None,
        "tools": None,
        "chosen_messages": None,
        "rejected_messages": None,
        "custom_fields": [],
        "multi_modal_input_keys": [],
    }


def row(
    number: int,
    pushed: dict[str, TensorView],
    *,
    changes: dict[str, Any] | None = None,
    **given: Any,
) -> PackedRow:
    """One row, named after its number."""
    eid = EID(2, 3, number, 5, f"{number:06x}")
    named = [(f"0:{name}", tensor) for name, tensor in pushed.items()]
    payload = join_frame([meta(eid) | (changes or {})], named)
    return PackedRow(uid=eid.uid, payload=payload, **{"tensors": {}, **given})


def packed(rows: list[PackedRow]) -> bytes:
    """The file, in one piece."""
    return b"".join(pack(rows))


def parsed(rows: list[PackedRow]) -> PackedBatch:
    """The batch, sent and received."""
    return PackedBatch.parse(packed(rows))


def numbers(dtype: str, values: list[Any]) -> TensorView:
    """A tensor of one dimension."""
    code = {
        "F32": "f",
        "I32": "i",
        "I64": "q",
        "BOOL": "?",
        "F64": "d",
        "I16": "h",
        "U8": "B",
        "U16": "H",
        "U32": "I",
    }[dtype]
    data = struct.pack(f"<{len(values)}{code}", *values)
    return TensorView(dtype, (len(values),), memoryview(data))


_TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
_NAMES = st.one_of(
    st.sampled_from(
        [
            "logprobs",
            "values",
            "advantages",
            "a/b",
            "a.offsets",
            "",
            "format",
            "x.1/y",
            "columns/uid",
        ]
    ),
    _TEXT,
).filter(lambda name: name not in ("tokens", "action_mask"))
_SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, TensorView]:
    """Tensors of one experience, of any dtypes and shapes, scalars and empty ones included."""
    length = draw(st.integers(2, 6))
    found = {
        "tokens": view(draw(st.sampled_from(["I32", "I64"])), (length,), draw(st.integers(0, 9)))
    }
    dtypes = st.sampled_from(sorted(ITEM_BYTES))
    views = st.builds(view, dtypes, _SHAPES, st.integers(0, 99))
    found |= draw(st.dictionaries(_NAMES, views, max_size=4))
    if draw(st.booleans()):
        found["action_mask"] = view("BOOL", (length - 1,))
    if draw(st.booleans()):
        found["multi_modal_inputs:pixels:a"] = draw(views)
    return found


@st.composite
def batches(draw: st.DrawFn, max_size: int = 6) -> list[PackedRow]:
    """Rows whose payloads hold such tensors, some replaced by computed ones."""
    rows = []
    for number in range(draw(st.integers(0, max_size))):
        found = draw(tensors())
        keys = ["pixels:a"] if "multi_modal_inputs:pixels:a" in found else []
        computed = {
            name: each
            for name, each in draw(tensors()).items()
            if name != "tokens" and not name.startswith("multi_modal_inputs:")
        }
        rows.append(
            row(
                number,
                found,
                changes={
                    "multi_modal_input_keys": keys,
                    "reward": draw(st.none() | st.floats(allow_nan=False) | st.integers()),
                    "info": draw(st.dictionaries(st.text(max_size=3), st.binary(max_size=3))),
                },
                tensors=computed if draw(st.booleans()) else {},
                group=draw(_TEXT),
                staleness=draw(st.none() | st.integers(-3, 9)),
                flags=draw(st.sampled_from([(), ("singleton",), ("masked", "zero_mask")])),
            )
        )
    return rows
