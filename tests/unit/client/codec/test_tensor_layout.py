"""Tables of a layout that is known are read as any other, and what is known is bounded."""

from __future__ import annotations

import json
import random
from unittest import mock

import pytest

from experience_buffer._codec import safetensors, tensor_layout
from experience_buffer.errors import TrxpError
from tests.unit.client.packed.packed_rows import view

LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_layout, "_known", {})


def table(length: int) -> bytes:
    tensors = {
        "0:tokens": view("I32", (length,)),
        "0:logprobs": view("F32", (length + 3,)),
        "0:action_mask": view("BOOL", (length,)),
        "0:empty": view("F32", (0,)),
    }
    return b"".join(safetensors.write(tensors.items()))


def found(data: bytes) -> str:
    """What reading says, in words."""
    try:
        rows = safetensors.read(memoryview(data), max_header_bytes=LIMIT)
    except TrxpError as error:
        return str(error)
    return repr([(name, view.dtype, view.shape, bytes(view.data)) for name, view in rows])


def unknown(data: bytes) -> str:
    """The same for a reader that has seen nothing before."""
    with mock.patch.dict(tensor_layout._known, clear=True):
        return found(data)


def test_other_lengths_of_a_layout_are_read_without_a_look_at_each_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = table(5), table(1234)
    expected = found(first), unknown(second)
    with monkeypatch.context() as patched:
        patched.delattr(safetensors, "_entries")
        assert (found(first), found(second)) == expected


def test_no_change_of_a_known_layout_is_read_otherwise() -> None:
    chance = random.Random(4)
    original = table(77)
    found(original)
    header = len(original) - 77 * 4 - 80 * 4 - 77
    for _ in range(3000):
        data = bytearray(original)
        for _ in range(chance.choice((1, 1, 2))):
            place = chance.randrange(header)
            how = chance.randrange(3)
            if how == 0:
                data[place] = chance.choice(b'0123456789 ,:"[]{}' + bytes([data[place] ^ 1]))
            elif how == 1:
                del data[place]
            else:
                data.insert(place, chance.choice(b"0123456789 "))
        assert found(bytes(data)) == unknown(bytes(data))


@pytest.mark.parametrize("padding", [0, 1, 8, 15])
def test_any_padding_is_read(padding: int) -> None:
    found(table(5))
    written = table(6)
    end = 8 + int.from_bytes(written[:8], "little")
    header = written[8:end].rstrip(b" ") + b" " * padding
    data = len(header).to_bytes(8, "little") + header + written[end:]
    assert found(data) == unknown(data) == found(written)


def test_a_table_cut_short_is_refused_in_the_same_words() -> None:
    data = table(9)
    found(data)
    for end in range(0, len(data), 7):
        assert found(data[:end]) == unknown(data[:end])
    assert found(data + b"\0") == unknown(data + b"\0")


def test_a_table_in_another_order_is_not_kept() -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    after = {"dtype": "I64", "shape": [1], "data_offsets": [4, 12]}
    header = json.dumps({"0:b": entry, "0:a": after}, separators=(",", ":")).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(12)
    assert "0:b" in found(data)
    assert not tensor_layout._known


def test_what_is_kept_is_bounded() -> None:
    for number in range(3 * tensor_layout._MAX_KNOWN):
        name = "x" * (number + 1)
        data = b"".join(safetensors.write([(name, view("F32", (3,)))]))
        assert found(data) == unknown(data)
        assert len(tensor_layout._known) <= tensor_layout._MAX_KNOWN
    for number in range(30):
        data = b"".join(safetensors.write([(f"{number}:x", view("F32", (3,)))]))
        assert found(data) == unknown(data)
    assert all(len(alike) <= tensor_layout._MAX_ALIKE for alike in tensor_layout._known.values())
    long = "y" * (tensor_layout._MAX_CHARS + 1)
    found(b"".join(safetensors.write([(long, view("F32", (3,)))])))
    assert not any(b"yyyy" in key for key in tensor_layout._known)
