"""Numbers by key, where keys come in order and their neighbours mostly stay together."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

_BITS = 6
_SIZE = 1 << _BITS
_MASK = _SIZE - 1

_Value = TypeVar("_Value", int, float)


class KeyMap(Generic[_Value]):
    """A map from distinct integer keys to numbers, without any order. Not thread-safe.

    Pages of `_SIZE` neighbours: some 11 bytes for a pair of 64-bit numbers, and a fraction of a
    microsecond for an operation. A page goes with its last key, so what stays for long among much
    that leaves costs at most one page each.
    """

    def __init__(self, absent: array[_Value]) -> None:
        """Start without keys; `absent` holds one number, which no key will have."""
        self._absent: _Value = absent[0]
        self._empty: array[_Value] = absent * _SIZE
        self._empty.append(0)
        self._pages: dict[int, array[_Value]] = {}
        """The numbers of `_SIZE` neighbours, and how many of them are there."""
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, int):
            return False
        page = self._pages.get(key >> _BITS)
        return page is not None and page[key & _MASK] != self._absent

    def __iter__(self) -> Iterator[int]:
        for number, page in self._pages.items():
            for key, value in enumerate(page[:_SIZE], number << _BITS):
                if value != self._absent:
                    yield key

    def __getitem__(self, key: int) -> _Value:
        """The number of a key; KeyError where it isn't there."""
        page = self._pages.get(key >> _BITS)
        if page is None or (value := page[key & _MASK]) == self._absent:
            raise KeyError(key)
        return value

    def __setitem__(self, key: int, value: _Value) -> None:
        """Change the number of a key that is there."""
        self._pages[key >> _BITS][key & _MASK] = value

    def add(self, key: int, value: _Value) -> None:
        """Add a key that isn't there."""
        page = self._pages.get(key >> _BITS)
        if page is None:
            page = self._pages[key >> _BITS] = self._empty[:]
        assert page[key & _MASK] == self._absent, f"key {key} is there already"
        page[key & _MASK] = value
        page[_SIZE] += 1
        self._num_keys += 1

    def pop(self, key: int) -> _Value:
        """Remove a key and return its number; KeyError where it isn't there."""
        page = self._pages.get(key >> _BITS)
        place = key & _MASK
        if page is None or (value := page[place]) == self._absent:
            raise KeyError(key)
        page[place] = self._absent
        page[_SIZE] -= 1
        if not page[_SIZE]:
            del self._pages[key >> _BITS]
        self._num_keys -= 1
        return value
