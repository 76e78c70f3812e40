"""The checksum of a row: no changed row passes for a sound one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experience_buffer_server.store.interface import DamagedRecordError
from experience_buffer_server.store.lmdb.disk.format import SEAL_BYTES, is_sound, seal, unseal

values = st.binary(max_size=3000)
keys = st.binary(min_size=4, max_size=511)
tables = st.integers(0, 15)


@given(tables, keys, values)
def test_a_sealed_row_comes_back(table: int, key: bytes, value: bytes) -> None:
    stored = memoryview(seal(table, key, value))
    assert len(stored) == len(value) + SEAL_BYTES
    assert unseal(table, key, stored) == value
    assert is_sound(table, key, stored)


@given(tables, keys, values, st.data())
def test_any_changed_byte_is_noticed(
    table: int, key: bytes, value: bytes, data: st.DataObject
) -> None:
    stored = bytearray(seal(table, key, value))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    refuse(table, key, bytes(stored))


@given(tables, keys, values, st.data())
def test_a_row_cut_short_or_longer_is_noticed(
    table: int, key: bytes, value: bytes, data: st.DataObject
) -> None:
    stored = seal(table, key, value)
    refuse(table, key, stored[: data.draw(st.integers(0, len(stored) - 1))])
    refuse(table, key, stored + data.draw(st.binary(min_size=1, max_size=9)))


@given(tables, keys, keys, values)
def test_a_row_under_another_key_or_in_another_table_is_noticed(
    table: int, key: bytes, other: bytes, value: bytes
) -> None:
    stored = seal(table, key, value)
    refuse(table + 1, key, stored)
    if other != key:
        refuse(table, other, stored)


def refuse(table: int, key: bytes, stored: bytes) -> None:
    assert not is_sound(table, key, stored)
    with pytest.raises(DamagedRecordError, match="don't match their checksum"):
        unseal(table, key, memoryview(stored))
