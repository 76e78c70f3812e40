"""Packed batches: nothing is lost on the way, and hostile bytes are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import tracemalloc
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer import packed, trxp
from experience_buffer._codec import safetensors as _safetensors
from experience_buffer._codec.frame import join_frame
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._packed import fields
from experience_buffer._packed.table import COLUMNS
from experience_buffer.eid import EID
from experience_buffer.errors import DataLossError, InvalidRequestError, TrxpError
from experience_buffer.packed import Facts, PackedBatch, PackedRow
from tests.unit.client.packed import packed_rows as rows_of
from tests.unit.client.packed.packed_rows import SINGLES, numbers, row, view


def sent(row: PackedRow) -> bytes:
    """What travels of a row when it travels alone."""
    return trxp.with_tensors(row.payload, row.tensors)


def real_rows() -> list[PackedRow]:
    return [PackedRow(uid=name, payload=single, tensors={}) for name, single in SINGLES.items()]


@given(rows_of.batches(), st.integers(1, 300))
@settings(max_examples=50)
def test_every_experience_comes_back_bit_for_bit(rows: list[PackedRow], frame_bytes: int) -> None:
    pieces = packed.pack(rows)
    data = b"".join(pieces)
    frames = list(packed.frames(pieces, frame_bytes=frame_bytes))
    assert b"".join(frames) == data
    assert {len(frame) for frame in frames[:-1]} <= {frame_bytes}
    assert 0 < len(frames[-1]) <= frame_bytes
    batch = PackedBatch.parse(data)
    assert len(batch) == len(rows)
    assert [batch.payload(index) for index in range(len(rows))] == [sent(row) for row in rows]
    assert batch.uids == [row.uid for row in rows]
    assert batch.groups == [row.group for row in rows]
    assert batch.flags == [tuple(row.flags) for row in rows]


def test_real_payloads_come_back_bit_for_bit() -> None:
    rows = real_rows()
    assert len(rows) > 25
    batch = PackedBatch.parse(rows_of.packed(rows))
    for index, each in enumerate(rows):
        assert batch.payload(index) == each.payload
        (expected,) = trxp.decode(each.payload)
        found = batch.of(index)
        assert found.serialize() == expected.serialize()
        assert found.experience_type == expected.experience_type
        (item,) = trxp.read(each.payload)
        assert isinstance(item, trxp.Item)
        assert repr(batch.meta(index)) == repr(item.meta)
        assert batch.column("prompt_length")[index] == expected.prompt_length
        assert batch.column("response_length")[index] == len(expected.tokens) - (
            expected.prompt_length
        )
    assert batch.of(-1).eid == expected.eid
    with pytest.raises(IndexError):
        batch.payload(len(rows))


@given(rows_of.batches())
@settings(max_examples=30)
def test_other_readers_of_safetensors_find_the_same_tensors(rows: list[PackedRow]) -> None:
    data = rows_of.packed(rows)
    table = dict(_safetensors.read(memoryview(data), max_header_bytes=2**20))
    for name, found in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
        expected = table.pop(name)
        assert (found["dtype"], tuple(found["shape"])) == (expected.dtype, expected.shape), name
        assert found["data"] == expected.data, name
    assert not table


@given(rows_of.batches())
@settings(max_examples=50)
def test_known_facts_change_nothing(rows: list[PackedRow]) -> None:
    known = []
    for each in rows:
        (item,) = trxp.read(sent(each))
        assert isinstance(item, trxp.Item)
        known.append(dataclasses.replace(each, facts=Facts.of(item)))
    assert rows_of.packed(known) == rows_of.packed(rows)


def test_columns() -> None:
    tokens, mask = view("I32", (5,)), view("BOOL", (2,))
    pair = {"tokens": tokens, "chosen": view("I32", (2,)), "rejected": view("I32", (1,))}
    many: list[dict[str, Any]] = [
        {"changes": {"reward": None, "prompt_length": 3}, "staleness": None, "num_deliveries": 7},
        {"changes": {"reward": 10**400, "truncate_status": "odd"}, "staleness": 0},
        {"changes": {"reward": math.nan}, "staleness": -2, "probability": 0.25},
        {"changes": {"reward": 0, "truncate_status": "response_truncated"}, "times_sampled": 11},
        {"changes": {"reward": True, "prompt_length": 2}, "generation": 2**40},
    ]
    rows = [row(n, {"tokens": tokens, "action_mask": mask}, **each) for n, each in enumerate(many)]
    rows.append(row(13, pair))
    batch = rows_of.parsed(rows)
    expected: dict[str, tuple[torch.dtype, list[Any]]] = {
        "reward": (torch.float64, [math.nan, math.inf, math.nan, 0, 1, 0.5]),
        "has_reward": (torch.bool, [False, True, True, True, True, True]),
        "prompt_length": (torch.int64, [3, 1, 1, 1, 2, 5]),
        "response_length": (torch.int64, [2, 4, 4, 4, 3, 0]),
        "truncate_status": (torch.uint8, [0, 3, 0, 2, 0, 0]),
        "run": (torch.int64, [0, 1, 2, 3, 4, 13]),
        "step": (torch.int64, [5] * 6),
        "num_deliveries": (torch.int64, [7, 1, 1, 1, 1, 1]),
        "staleness": (torch.int64, [0, 0, -2, 0, 0, 0]),
        "has_staleness": (torch.bool, [False, True, True, False, False, False]),
        "probability": (torch.float64, [1, 1, 0.25, 1, 1, 1]),
        "times_sampled": (torch.int64, [0, 0, 0, 11, 0, 0]),
        "generation": (torch.int64, [0, 0, 0, 0, 2**40, 0]),
    }
    assert batch.columns == sorted(expected)
    for name, (dtype, values) in expected.items():
        column = batch.column(name)
        assert column.dtype == dtype, name
        assert repr(column.tolist()) == repr(torch.tensor(values, dtype=dtype).tolist()), name
    with pytest.raises(KeyError, match="no column 'rewards'; there are generation, has_reward"):
        batch.column("rewards")


def test_computed_tensors_replace_those_of_the_payload() -> None:
    pushed = {"tokens": view("I32", (3,)), "action_mask": numbers("BOOL", [True, True])}
    masked = row(2, pushed, tensors={"action_mask": numbers("BOOL", [False, False])})
    batch = rows_of.parsed([masked])
    assert batch.tensor("action_mask").tolist() == [False, False]
    odd = row(2, pushed, tensors={"multi_modal_inputs:a": view("F32", (2,))})
    with pytest.raises(ValueError, match="its key is part of the metadata"):
        packed.pack([odd])


def test_tensors_are_views_on_what_was_received() -> None:
    many = [row(n, {"tokens": view("I32", (n,)), "x": view("F32", (n, 2))}) for n in (3, 5)]
    data = bytearray(rows_of.packed(many))
    batch = PackedBatch.parse(data)
    before = bytes(data)
    x = batch.tensor("x")
    assert x.shape == (8, 2)
    assert batch.offsets("x").tolist() == [0, 3, 8]
    x.zero_()
    assert bytes(data) != before
    assert batch.of(1).extra["x"].sum() == 0
    for name in batch.columns:
        batch.column(name).zero_()
    again = PackedBatch.parse(data)
    assert not any(again.column(name).any() for name in again.columns)
    of_bytes = PackedBatch.parse(before)
    of_bytes.tensor("x").zero_()
    assert before == rows_of.packed(many)
    assert of_bytes.of(1).extra["x"].sum() == 0
    # An odd address costs a copy, and no more.
    shifted = bytearray(b"x" + before)
    assert PackedBatch.parse(memoryview(shifted)[1:]).tensor("x").shape == (8, 2)


def test_forms_are_kept_apart() -> None:
    tokens = view("I32", (3,))
    vast = TensorView("F32", (2**47, 0), memoryview(b""))
    many = [
        {"x": view("F32", (2, 3))},
        {"x": view("BF16", (2, 3))},
        {"x": view("F32", (5, 2))},
        {"x": view("F32", ())},
        {"x": view("F32", (1,))},
        {},
        {"x": view("F32", (0, 3))},
        {"x": vast},
        {"x": vast},
        {"x": vast},
    ]
    batch = rows_of.parsed([row(n, {"tokens": tokens} | each) for n, each in enumerate(many)])
    assert batch.fields == ["tokens", "x"]
    for index, expected in enumerate(many):
        (item,) = trxp.read(batch.payload(index))
        assert isinstance(item, trxp.Item)
        assert item.tensors.keys() == {"tokens"} | expected.keys()
        if expected:
            found = item.tensors["x"]
            assert (found.dtype, found.shape) == (expected["x"].dtype, expected["x"].shape)
            assert found.data == expected["x"].data
    for read in (batch.tensor, batch.offsets):
        with pytest.raises(ValueError, match=r"x differs .*F32 \['\*', 3\], BF16 .*take `padded`"):
            read("x")
        with pytest.raises(KeyError, match="no field 'y'; there are tokens, x"):
            read("y")


TOKENS = {"tokens": view("I32", (3,))}
GOOD = row(2, TOKENS)


SCALAR = view("F32", ())
DAMAGED = {
    "cut": (GOOD.payload[:-1], "add up to"),
    "empty": (b"", "doesn't begin"),
    "two": (trxp.merge([GOOD.payload, GOOD.payload]), "experience"),
    "none": (trxp.merge([]), "tokens|experiences"),
    "tensor_of_another": (
        join_frame([rows_of.meta(EID(2, 3))], [("0:tokens", view("I32", (3,))), ("1:x", SCALAR)]),
        "1:x",
    ),
    "tokens_scalar": (row(2, {"tokens": view("I32", ())}).payload, "tokens"),
    "no_tokens": (row(2, {"x": view("I32", (2,))}).payload, "tokens"),
    "opcode": (bytes(GOOD.payload[:40]) + b"\xff" + GOOD.payload[41:], "metadata offset"),
    "reward": (row(2, TOKENS, changes={"reward": "1"}).payload, "send float"),
    "eid": (row(2, TOKENS, changes={"eid": None}).payload, "send EID"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_payload_is_named(name: str) -> None:
    payload, reason = DAMAGED[name]
    bad = PackedRow(uid="2/3/7/5/bad", payload=payload, tensors={})
    with pytest.raises(DataLossError, match=f"'2/3/7/5/bad' is damaged: .*({reason})") as caught:
        packed.pack([GOOD, bad])
    assert caught.value.subject == "2/3/7/5/bad"


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_found_by_the_reader_where_facts_are_known(name: str) -> None:
    payload, reason = DAMAGED[name]
    (item,) = trxp.read(GOOD.payload)
    assert isinstance(item, trxp.Item)
    bad = PackedRow(uid="2/3/7/5/bad", payload=payload, tensors={}, facts=Facts.of(item))
    if name not in ("opcode", "reward", "eid"):
        with pytest.raises(DataLossError, match="'2/3/7/5/bad' is damaged"):
            packed.pack([GOOD, bad])
        return
    batch = rows_of.parsed([GOOD, bad])
    for read in (batch.of, batch.meta):
        with pytest.raises(TrxpError, match=reason):
            read(1)
    assert batch.of(0).eid.uid == GOOD.uid
    assert batch.padded()["input_ids"].shape == (2, 3)


def test_what_fits_into_no_file_is_named() -> None:
    with pytest.raises(DataLossError, match="run of '2/3/2/5/000002' doesn't fit into 64 bits"):
        packed.pack([GOOD, row(2, TOKENS, changes={"eid": {**EID_PARTS, "run": 2**63}})])
    for flags in (["a b"], [""], ["a", "b\n"]):
        with pytest.raises(ValueError, match="a flag is a word"):
            packed.pack([dataclasses.replace(GOOD, flags=flags)])
    long = row(3, TOKENS | {"x" * 2**22: view("U8", (1,))})
    with pytest.raises(InvalidRequestError, match="over the limit of 8388608; ask for TRXP"):
        packed.pack([long])


EID_PARTS = {"batch": 2, "task": 3, "run": 7, "step": 5, "suffix": "a"}


def test_too_many_fields_are_refused_before_they_cost_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fields, "MAX_OFFSETS", 12)
    many = [row(n, TOKENS | {f"x{n}": view("U8", (1,))}) for n in range(3)]
    packed.pack(many[:2])
    with pytest.raises(InvalidRequestError, match="'2/3/2/5/000002' brings a batch of 3 to more"):
        packed.pack(many)


def test_an_empty_batch() -> None:
    batch = rows_of.parsed([])
    assert (len(batch), batch.uids, batch.groups, batch.fields) == (0, [], [], [])
    assert batch.column("reward").shape == (0,)
    for lay_out in (batch.padded, batch.varlen):
        with pytest.raises(ValueError, match="the batch is empty"):
            lay_out()


def entries() -> dict[str, TensorView]:
    rows = [
        row(2, TOKENS | {"x": view("F32", (2, 3)), "s": view("F32", ())}),
        row(3, TOKENS | {"x": view("BF16", (2, 3))}),
    ]
    data = memoryview(rows_of.packed(rows))
    return dict(_safetensors.read(data, max_header_bytes=2**20))


def rewritten(changes: dict[str, TensorView | None]) -> bytes:
    table = {name: each for name, each in (entries() | changes).items() if each is not None}
    return b"".join(_safetensors.write(table.items()))


BAD: dict[str, tuple[dict[str, TensorView | None], str]] = {
    "no_format": ({"format": None}, "aren't a packed batch"),
    "format_version": ({"format": numbers("I64", [2, 2])}, "version 2; this reader knows 1"),
    "num_rows_negative": ({"format": numbers("I64", [1, -1])}, "-1 experiences"),
    "num_rows_huge": ({"format": numbers("I64", [1, 2**62])}, "at most 65536"),
    "num_rows_other": ({"format": numbers("I64", [1, 3])}, "not [3]"),
    "kind": ({"more/x": view("U8", (1,))}, "unknown kind"),
    "number": ({"fields.0/x": view("U8", (1,))}, "unknown kind"),
    "column_missing": ({"columns/reward": None}, "missing, or not F64"),
    "column_dtype": ({"columns/reward": numbers("F32", [1, 2])}, "missing, or not F64"),
    "column_short": ({"columns/reward": numbers("F64", [1])}, "shape [1], not [2]"),
    "column_bool": ({"columns/has_reward": TensorView("BOOL", (2,), memoryview(b"\1\2"))}, "0 nor"),
    "bytes_missing": ({"bytes/uid": None}, "missing, or not U8"),
    "byte_offsets_missing": ({"byte_offsets/uid": None}, "missing, or not I64"),
    "byte_offsets_beyond": ({"byte_offsets/uid": numbers("I64", [0, 3, 99])}, "ascending"),
    "uid_utf8": ({"bytes/uid": TensorView("U8", (28,), memoryview(b"\xff" * 28))}, "UTF-8"),
    "offsets_missing": ({"offsets/tokens": None}, "missing, or not I64"),
    "offsets_start": ({"offsets/tokens": numbers("I64", [1, 3, 6])}, "not ascending"),
    "offsets_order": ({"offsets/tokens": numbers("I64", [0, 7, 6])}, "not ascending"),
    "offsets_negative": ({"offsets/tokens": numbers("I64", [0, -3, 6])}, "not ascending"),
    "offsets_end": ({"offsets/tokens": numbers("I64", [0, 3, 5])}, "not ascending"),
    "offsets_dtype": ({"offsets/tokens": view("I32", (3,))}, "missing, or not I64"),
    "offsets_alone": ({"offsets/y": numbers("I64", [0, 0, 0])}, "one of the two"),
    "both_kinds": ({"scalars/tokens": view("I32", (6,))}, "one of the two"),
    "no_dimension": ({"fields/tokens": view("I32", ())}, "0 dimensions"),
    "scalar_shape": ({"scalars/s": view("F32", (1, 1))}, "2 dimensions"),
    "scalar_span": ({"present/s": numbers("BOOL", [True, True])}, "disagree"),
    "present_shape": ({"present/x": numbers("BOOL", [True])}, "not BOOL of shape [2]"),
    "present_value": ({"present/x": TensorView("BOOL", (2,), memoryview(b"\1\3"))}, "0 nor"),
    "present_span": ({"present/x": numbers("BOOL", [False, True])}, "disagree"),
    "present_twice": ({"present/x": None}, "in two forms"),
    "form_gap": (
        {
            "fields.1/x": None,
            "offsets.1/x": None,
            "present.1/x": None,
            "fields.2/x": view("U8", (0,)),
        },
        "form 2 follows 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_file_is_refused_with_a_reason(name: str) -> None:
    assert rewritten({}) == rewritten({})
    PackedBatch.parse(rewritten({}))
    changes, reason = BAD[name]
    with pytest.raises(TrxpError) as caught:
        PackedBatch.parse(rewritten(changes))
    assert reason in str(caught.value)


def test_a_name_that_occurs_twice_is_refused() -> None:
    table = [*entries().items(), ("columns/reward", numbers("F64", [1, 2]))]
    with pytest.raises(TrxpError, match=r"columns/reward.*occurs twice"):
        PackedBatch.parse(b"".join(_safetensors.write(table)))


def test_a_newer_servers_columns_are_offered() -> None:
    batch = PackedBatch.parse(rewritten({"columns/age_seconds": numbers("F64", [1, 2])}))
    assert batch.column("age_seconds").tolist() == [1, 2]


def read_all(batch: PackedBatch) -> None:
    """Call everything; a file that parses may still be refused, but by no other error."""
    calls: list[Any] = [batch.padded, batch.varlen]
    calls += [lambda name=name: batch.tensor(name) for name in batch.fields]
    calls += [lambda name=name: batch.offsets(name) for name in batch.fields]
    calls += [lambda name=name: batch.padded(fields=[name]) for name in batch.fields]
    calls += [lambda index=index: batch.of(index) for index in range(len(batch))]
    calls += [lambda index=index: batch.meta(index) for index in range(len(batch))]
    for call in calls:
        with contextlib.suppress(ValueError):
            call()


@given(st.data())
@settings(max_examples=300)
def test_no_byte_breaks_a_reader(data: st.DataObject) -> None:
    file = bytearray(rewritten({}))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(file) - 1))
        file[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(file)))
    tracemalloc.start()
    try:
        batch = PackedBatch.parse(file[:cut])
    except TrxpError:
        pass
    else:
        read_all(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_the_examples_of_the_documentation() -> None:
    text = (rows_of.DATA.parents[2] / "docs" / "packed.md").read_text("utf-8")
    usage, reader = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    tensors = {
        "tokens": view("I32", (5,)),
        "logprobs": view("F32", (4,)),
        "advantages": view("F32", (4,)),
    }
    scope: dict[str, Any] = {"data": rows_of.packed([row(n, tensors) for n in range(4)])}
    exec(usage, scope)
    assert scope["experience"].eid.run == 3
    exec(reader, scope)
    assert scope["uid"] == "2/3/3/5/000003"
    assert scope["prompt"] == scope["experience"].tokens[:1].tolist()


def test_the_documentation_lists_all_columns() -> None:
    text = (rows_of.DATA.parents[2] / "docs" / "packed.md").read_text("utf-8")
    table = text.partition("| column |")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for line in table.splitlines()[2:]:
        names, dtypes = line.split("|")[1:3]
        columns = re.findall(r"`(\w+)`", names)
        codes = dtypes.strip().split(", ")
        found |= zip(columns, codes * len(columns) if len(codes) == 1 else codes, strict=True)
    assert found == COLUMNS
