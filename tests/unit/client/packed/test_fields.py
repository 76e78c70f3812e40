"""Rows of one layout are taken together: with the same file, and the same refusals, as one by one."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer._codec.safetensors import TensorView
from experience_buffer._packed import fields
from experience_buffer._packed import layout as _packed_layout
from experience_buffer._packed import row as _packed_row
from experience_buffer.errors import DataLossError
from experience_buffer.packed import Facts, PackedRow
from tests.unit.client.packed.packed_rows import batches, numbers, packed, row, view


@contextmanager
def one_by_one() -> Iterator[None]:
    """No table has a layout."""
    with (
        mock.patch.object(fields, "kept_layout", return_value=None),
        mock.patch.object(fields, "make_layout", return_value=None),
    ):
        yield


def outcome(rows: list[PackedRow]) -> bytes | tuple[str, str]:
    """The file, or why there is none."""
    try:
        return packed(rows)
    except DataLossError as error:
        return str(error), error.subject


def expected(rows: list[PackedRow]) -> bytes | tuple[str, str]:
    with one_by_one():
        return outcome(rows)


def rollout(number: int, length: int, *, kind: int = 0) -> PackedRow:
    """One of three layouts, with lengths of its own."""
    found = {
        "tokens": view("I32", (length,), number),
        "logprobs": view("F32", (length // 2,), number + 1),
    }
    if kind:
        found["routed_experts"] = view("U8", (length - 1, 3, 2), number)
    if kind == 2:
        found['ü "quoted"'] = view("BF16", (2,), number)
    advantages = {"advantages": numbers("F32", [0.5] * (length // 2))} if number % 3 else {}
    # Where the facts are known the metadata isn't read, and the tensors with it.
    facts = Facts(response_length=1, reward=0.5, truncate_status=None, run=number, step=5)
    return row(number, found, tensors=advantages, facts=facts)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=12))
def test_the_file_is_the_same(shapes: list[tuple[int, int]]) -> None:
    rows = [rollout(number, *shape[:1], kind=shape[1]) for number, shape in enumerate(shapes)]
    assert outcome(rows) == expected(rows)


@given(batches(), batches(max_size=2))
def test_the_file_is_the_same_whatever_there_is(
    some: list[PackedRow], more: list[PackedRow]
) -> None:
    rows = [each for each in some for _ in range(2)] + more
    assert outcome(rows) == expected(rows)


@given(st.data())
def test_a_changed_table_is_read_as_it_would_be_alone(data: st.DataObject) -> None:
    """Between sound neighbours, whose pattern it may match or not."""
    sound = [rollout(number, 7 + number, kind=1) for number in range(3)]
    packed(sound)
    payload = bytearray(sound[1].payload)
    start = 21 + struct.unpack_from("<Q", payload, 5)[0]
    header_bytes = struct.unpack_from("<Q", payload, start)[0]
    place = start + data.draw(st.integers(0, 8 + header_bytes - 1))
    payload[place] = data.draw(st.sampled_from([*b'0123456789" ,]}', 0, 255]))
    sound[1].payload = bytes(payload)
    assert outcome(sound) == expected(sound)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"shape":[8]', '"shape":[9]'),
        ('"shape":[8],"data_offsets":[16,48]', '"shape":[7],"data_offsets":[16,44]'),
        ('"data_offsets":[0,16]', '"data_offsets":[4,16]'),
        ('"data_offsets":[16,48]', '"data_offsets":[12,48]'),
        ('"shape":[7,3,2]', '"shape":[6,3,2]'),
        ('"dtype":"I32"', '"dtype":"F32"'),
        ('"0:tokens"', '"1:tokens"'),
        # Numbers are spelled as JSON spells them.
        ('"shape":[8]', '"shape":[08]'),
        ('"data_offsets":[16,48]', '"data_offsets":[16,048]'),
        ('"shape":[8]', '"shape":[+8]'),
        ('"shape":[8]', '"shape":[8_]'),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_by_name(old: str, new: str) -> None:
    sound = [rollout(number, 8, kind=1) for number in range(3)]
    text = bytes(sound[1].payload)
    assert (text.count(old.encode()), text.count(b"]}} ")) == (1, 1)
    # The padding makes room for what is longer.
    text = text.replace(b"]}} ", b"]}}", len(new) - len(old))
    sound[1].payload = text.replace(old.encode(), new.encode())
    found = outcome(sound)
    assert found == expected(sound)
    if new != '"dtype":"F32"':
        assert isinstance(found, tuple)
        assert found[1] == sound[1].uid


@pytest.mark.parametrize("change", [-6, 6])
def test_data_must_end_with_the_last_tensor(change: int) -> None:
    sound = [rollout(number, 8, kind=1) for number in range(3)]
    payload = bytearray(sound[1].payload)
    payload = payload[:change] if change < 0 else payload + bytes(change)
    struct.pack_into("<Q", payload, 13, struct.unpack_from("<Q", payload, 13)[0] + change)
    sound[1].payload = bytes(payload)
    found = outcome(sound)
    assert found == expected(sound)
    assert isinstance(found, tuple)


def test_the_tables_of_one_layout_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [rollout(number, 5 + number, kind=number // 4) for number in range(12)]
    wanted = expected(rows)
    read = mock.Mock(wraps=_packed_row.read_row)
    monkeypatch.setattr(fields, "read_row", read)
    packed(rows)
    read.reset_mock()
    assert outcome(rows) == wanted
    # Names that need quoting have no layout.
    assert [each.args[0].uid for each in read.call_args_list] == [
        rows[index].uid for index in (0, 4, 8, 9, 10, 11)
    ]


def framed(section: bytes) -> bytes:
    return b"TRXP\x01" + struct.pack("<QQ", 0, len(section)) + section


def test_a_header_longer_than_the_section_is_no_match() -> None:
    layout = _packed_layout.make_layout({"tokens": view("I32", (0,))})
    assert layout is not None
    table = {"0:tokens": {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}}
    header = json.dumps(table, separators=(",", ":")).encode()
    whole = framed(struct.pack("<Q", len(header)) + header)
    longer = framed(struct.pack("<Q", len(header) + 8) + header)
    padded = framed(struct.pack("<Q", len(header) + 10_000) + header + b" " * 10_000)
    vast = framed(struct.pack("<Q", 2**64 - 1) + header)
    headless = framed(b"\x00" * 7)
    for other in (longer, padded, vast, headless, b"", whole[:-1]):
        run = layout.run_of([memoryview(whole), whole, other, whole])
        assert [*map(bytes, run.payloads)] == [whole, whole]
        assert run.columns == [([0, 0], [len(whole)] * 2, [len(whole)] * 2)]
        assert layout.run_of([other]) == ([], [], [])


def test_a_batch_makes_one_layout_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who pushes tables of many kinds doesn't make the server compile patterns all day."""
    made: list[object] = []

    def make(tensors: dict[str, TensorView]) -> object:
        made.append(tuple(tensors))
        return _packed_layout.make_layout(tensors)

    monkeypatch.setattr(_packed_layout, "_kept", {})
    monkeypatch.setattr(fields, "make_layout", make)
    rows = [
        row(number, {"tokens": view("I32", (3,)), f"only here {number}": view("I8", (2,))})
        for number in range(5)
    ]
    assert outcome(rows) == expected(rows)
    assert len(made) == 1
    for _ in range(4):
        packed(rows)
    assert len(made) == len(set(made)) == 5


def test_few_layouts_are_kept() -> None:
    for number in range(200):
        packed([row(0, {"tokens": view("I32", (3,)), f"kept {number}": view("I8", (2,))})])
    assert len(_packed_layout._kept) <= 64


@pytest.mark.parametrize(
    "other",
    [
        {"a\\b": view("I8", (2,))},
        {'a"b': view("I8", (2,))},
        {"a\nb": view("I8", (2,))},
        {"x" * 101: view("I8", (2,))},
        {"scalar": view("I8", ())},
        {"no bytes": view("I8", (3, 0))},
        {"vast": view("I8", (0, 2**33))},
        {str(number): view("I8", (1,)) for number in range(16)},
    ],
    ids=lambda other: next(iter(other))[:9],
)
def test_odd_tables_have_no_layout(other: dict[str, TensorView]) -> None:
    assert _packed_layout.make_layout({"tokens": view("I32", (3,)), **other}) is None
    rows = [row(number, {"tokens": view("I32", (3,)), **other}) for number in range(3)]
    assert outcome(rows) == expected(rows)
