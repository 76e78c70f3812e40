"""The format row: what opens, and what is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from experience_buffer_server.store.interface import StoreFormatError
from experience_buffer_server.store.lmdb.disk.format import FORMAT_VALUE, FORMAT_VERSION
from experience_buffer_server.store.lmdb.disk.format import format_value as sealed
from experience_buffer_server.store.lmdb.disk.opening import check_format

PATH = Path("/store")


def refusal(value: bytes | None) -> str:
    with pytest.raises(StoreFormatError) as caught:
        check_format(value, PATH)
    return str(caught.value)


def test_its_own_opens() -> None:
    check_format(sealed(FORMAT_VERSION), PATH)


@pytest.mark.parametrize("value", [b"experience-buffer store 1", sealed(4)])
def test_an_older_store_is_refused_with_the_way_to_the_new_one(value: bytes) -> None:
    text = refusal(value)
    version = 1 if value.endswith(b"1") else 4
    assert f"format version {version}, this server reads version {FORMAT_VERSION}" in text
    assert "run the server version that wrote it until what it holds is consumed" in text


@pytest.mark.parametrize(
    "value", [sealed(FORMAT_VERSION + 1), sealed(17), b"experience-buffer store 997"]
)
def test_a_newer_store_asks_for_a_newer_server(value: bytes) -> None:
    assert "upgrade this server to the version that wrote it" in refusal(value)


@pytest.mark.parametrize("value", [None, b"", b"something else", b"{}"])
def test_what_is_no_store_is_left_alone(value: bytes | None) -> None:
    assert "is not an experience buffer store; use another directory" in refusal(value)


def test_a_damaged_row_is_called_so_whatever_byte_it_is() -> None:
    """Above all no flipped digit sends anybody to a server of another version."""
    for place in range(len(FORMAT_VALUE)):
        for bit in range(8):
            value = bytearray(FORMAT_VALUE)
            value[place] ^= 1 << bit
            assert "is damaged" in refusal(bytes(value)), bytes(value)
    assert "is damaged" in refusal(FORMAT_VALUE[:25])
