"""The safetensors format: its writer's bytes, and a table that is refused unless it is sound."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from experience_buffer._codec import safetensors, tensor_layout
from experience_buffer._codec.safetensors import ITEM_BYTES, TensorView
from experience_buffer._dense.tensors import DTYPES, tensor_view
from experience_buffer.errors import TrxpError


def file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read(data: bytes) -> list[tuple[str, TensorView]]:
    return safetensors.read(memoryview(data), max_header_bytes=100_000)


def compact(data: bytes) -> bytes:
    """The same file with a header as the format's own writer spells it, where the header is JSON."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start])
    except (ValueError, RecursionError):
        return data
    if start > len(data) or data[8:start] != json.dumps(header).encode():
        return data
    return file(json.dumps(header, separators=(",", ":")).encode(), data[start:])


def entry(begin: int, end: int, *, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_is_written_in_the_order_of_the_formats_own_writer() -> None:
    tensors = {
        f"{index:02}:{code}": torch.arange(32, dtype=torch.uint8).view(dtype)
        for index, (code, dtype) in enumerate(DTYPES.items())
    }
    assert len(tensors) == len(ITEM_BYTES)
    expected = save(tensors)
    views = [(name, tensor_view(tensor)) for name, tensor in tensors.items()]
    assert b"".join(safetensors.write(views)) == expected
    assert [(name, view.dtype) for name, view in read(expected)] == sorted(
        ((name, view.dtype) for name, view in views),
        key=lambda pair: (list(ITEM_BYTES).index(pair[1]), pair[0]),
    )


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.text(max_size=12),
        st.tuples(
            st.sampled_from([torch.int64, torch.bfloat16, torch.bool, torch.float32]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_table_is_written_and_read_as_safetensors_does(
    described: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {
        name: torch.ones(shape).to(dtype)
        for name, (dtype, shape) in described.items()
        if name != "__metadata__"
    }
    views = {name: tensor_view(tensor) for name, tensor in tensors.items()}
    data = b"".join(safetensors.write(views.items()))
    assert data == save(tensors)
    found = read(data)
    assert dict(found).keys() == tensors.keys()
    for name, view in found:
        assert (view.dtype, view.shape) == (views[name].dtype, views[name].shape)
        assert view.data == views[name].data
    # Any other spelling of the same header says the same.
    end = 8 + int.from_bytes(data[:8], "little")
    respelled = file(json.loads(data[8:end]), data[end:])
    assert [(n, v.dtype, v.shape) for n, v in read(respelled)] == [
        (n, v.dtype, v.shape) for n, v in found
    ]


def test_tensors_may_lie_in_another_order_than_their_names() -> None:
    data = file({"b": entry(3, 5), "a": entry(0, 3), "none": entry(3, 3)}, b"abcde")
    assert compact(data) != data
    for spelled in (data, compact(data)):
        found = [(name, bytes(view.data)) for name, view in read(spelled)]
        assert found == [("b", b"de"), ("a", b"abc"), ("none", b"")]


A = '"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}'
NONE = '"none":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}'
BROKEN = {
    "short": (b"\2\0\0\0", "has 4 bytes"),
    "header_longer_than_file": ((99).to_bytes(8, "little") + b"{}", "only 2 follow"),
    "header_huge": (b"\xff" * 8 + b"{}", "exceeds the limit"),
    "no_utf8": (file(b'{"\xff":1}'), "UTF-8"),
    "no_json": (file(b'{"a":'), "isn't JSON"),
    "deep_json": (file(b"[" * 90_000), "isn't JSON"),
    "long_number": (file(b'{"a":' + b"1" * 9_000 + b"}"), "isn't JSON"),
    "no_object": (file(b"[]"), "isn't a JSON object"),
    "entry_no_object": (file({"a": 1}), "each once"),
    "metadata": (file({"__metadata__": {"format": "pt"}}), "each once"),
    "field_missing": (file({"a": {"dtype": "U8", "shape": [0]}}), "each once"),
    "field_twice": (
        file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "each once",
    ),
    "unknown_dtype": (file({"a": entry(0, 3, dtype="F4")}, b"abc"), "dtype 'F4'"),
    "dtype_number": (file({"a": entry(0, 3) | {"dtype": 1}}, b"abc"), "dtype isn't text"),
    "negative": (file({"a": entry(0, 3, shape=[-3])}, b"abc"), "no list of sizes"),
    "float_shape": (file({"a": entry(0, 3, shape=[3.0])}, b"abc"), "no list of sizes"),
    "bool_shape": (file({"a": entry(0, 1, shape=[True])}, b"a"), "no list of sizes"),
    "many_dimensions": (file({"a": entry(0, 1, shape=[1] * 65)}, b"a"), "65 dimensions"),
    "very_many_dimensions": (
        file({"a": entry(0, 1, shape=[2**62] * 4_000)}, b"a"),
        "4000 dimensions",
    ),
    "many_dimensions_canonical": (
        file(
            b'{"a":{"dtype":"U8","shape":[' + b"1," * 64 + b'1],"data_offsets":[0,1]}}',
            b"a",
        ),
        "65 dimensions",
    ),
    "empty_but_vast": (file({"a": entry(0, 0, shape=[0, 2**40, 2**40])}), "beyond what"),
    "three_offsets": (file({"a": entry(0, 3) | {"data_offsets": [0, 3, 3]}}, b"abc"), "a pair"),
    "shape_lies": (file({"a": entry(0, 3, shape=[4])}, b"abc"), "don't hold a U8 of [4]"),
    "shape_overflows": (file({"a": entry(0, 0, shape=[2**62] * 8)}), "don't hold"),
    "item_size": (file({"a": entry(0, 3, dtype="F32")}, b"abc"), "don't hold a F32 of [3]"),
    "overlap": (file({"a": entry(0, 3), "b": entry(2, 5)}, b"abcde"), "3 comes next"),
    "begin_lies": (
        file({"a": entry(0, 3), "b": entry(2, 5, shape=[2])}, b"abcde"),
        "3 comes next",
    ),
    "same_range": (file({"a": entry(0, 3), "b": entry(0, 3)}, b"abc"), "3 comes next"),
    "hole": (file({"a": entry(0, 1), "b": entry(2, 3)}, b"abc"), "1 comes next"),
    "starts_late": (file({"a": entry(1, 3)}, b"abc"), "0 comes next"),
    "backwards": (file({"a": entry(3, 0, shape=[0])}, b"abc"), "0 comes next"),
    "beyond": (file({"a": entry(0, 4)}, b"abc"), "take 4 bytes of 3"),
    "data_left": (file({"a": entry(0, 3)}, b"abcd"), "take 3 bytes of 4"),
    "no_comma": (file(f"{{{A}{A}}}".encode(), b"abc"), "isn't JSON"),
    "brace_for_comma": (file(f"{{{A}{{{A}}}".encode(), b"abc"), "isn't JSON"),
    "no_end": (file(f"{{{A},".encode(), b"abc"), "isn't JSON"),
    "end_in_the_middle": (file(f"{{{A}}},{NONE}".encode(), b"abc"), "isn't JSON"),
    "comma_for_end": (file(f"{{{A},{A.replace('a', 'b')},".encode(), b"abcabc"), "isn't JSON"),
    "leading_zero": (file(f"{{{A.replace('[3]', '[03]')}}}".encode(), b"abc"), "isn't JSON"),
    "offset_00": (file(f"{{{A.replace('[0,', '[00,')}}}".encode(), b"abc"), "isn't JSON"),
    "foreign_digit": (file(f"{{{A.replace('[3]', '[٣]')}}}".encode(), b"abc"), "isn't JSON"),
    "unescaped_control": (file(b'{"\1":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_refused_with_a_reason(name: str) -> None:
    data, reason = BROKEN[name]
    for spelled in (data, compact(data)):
        with pytest.raises(TrxpError) as caught:
            read(spelled)
        assert reason in str(caught.value)
        assert str(caught.value).startswith("tensor table")


def said(data: bytes) -> str:
    """What reading says, in words."""
    try:
        return repr([(name, v.dtype, v.shape, bytes(v.data)) for name, v in read(data)])
    except TrxpError as error:
        return str(error)


def changed(header: bytes, chance: random.Random) -> bytes:
    """A header with one to three small changes, some of which leave it as valid as it was."""
    text = header.decode()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place, end = sorted(chance.choices(range(len(text) + 1), k=2))
        how = chance.randrange(5)
        if how == 0:
            text = text[:place] + chance.choice('0123456789 ,:"[]{}\\\n\x7f٣²é') + text[place:]
        elif how == 1:
            text = text[:place] + text[place + 1 :]
        elif how == 2:
            text = text[:place] + chance.choice('019,:"[]{}') + text[place + 1 :]
        elif how == 3:
            entries = text.split("},")
            chance.shuffle(entries)
            text = "},".join(entries)
        else:
            text = text[:end] + text[place:end] + text[end:]
    return text.encode()


def test_what_is_read_fast_is_read_by_the_parser_of_json_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(6)
    view = TensorView("U8", (3,), memoryview(b"abc"))
    wide = TensorView("F32", (2, 1), memoryview(b"abcdefgh"))
    tables = [[("a", view)], [("a", view), ("0:é", view), ("b", wide), ("", wide)]]
    num_read = 0
    for _ in range(3_000):
        written = b"".join(safetensors.write(chance.choice(tables)))
        start = 8 + int.from_bytes(written[:8], "little")
        data = file(changed(written[8:start].rstrip(), chance), written[start:])
        with monkeypatch.context() as patched:
            patched.setattr(tensor_layout, "_known", {})
            fast = said(data)
            patched.setattr(safetensors, "_entries", lambda header: None)
            patched.setattr(tensor_layout, "_known", {})
            assert fast == said(data), data
        num_read += fast.startswith("[")
    assert 300 < num_read < 2_700, "some are sound and some aren't"


def test_a_layout_is_kept_of_small_tables_only() -> None:
    tensor = TensorView("U8", (1,), memoryview(b"x"))
    for names in (["n" * 5_000], [str(number) for number in range(65)]):
        before = tensor_layout.kept_layout.cache_info()
        safetensors.write([(name, tensor) for name in names])
        assert tensor_layout.kept_layout.cache_info() == before


def test_a_name_given_twice_is_listed_twice() -> None:
    nothing = '"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for separator in (",", " , "):
        found = read(file(f"{{{nothing}{separator}{nothing}}}".encode()))
        assert [name for name, _ in found] == ["a", "a"]


def test_half_a_surrogate_pair_is_no_name() -> None:
    with pytest.raises(TrxpError, match="surrogate"):
        safetensors.write([("\ud800", TensorView("U8", (0,), memoryview(b"")))])


def test_sizes_of_too_many_dimensions_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their product would take half a minute of a server's time."""
    sizes = b",".join([b"9" * 18] * 200_000)
    data = file(b'{"a":{"dtype":"U8","shape":[' + sizes + b'],"data_offsets":[0,1]}}', b"a")
    multiplied: list[object] = []
    monkeypatch.setattr(safetensors, "prod", multiplied.append)
    with pytest.raises(TrxpError, match="200000 dimensions"):
        safetensors.read(memoryview(data), max_header_bytes=len(data))
    assert not multiplied
