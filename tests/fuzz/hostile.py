"""Values that no argument expects: each is made anew, since some change or end when they are used."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import numpy as np
import torch


class CallersError(Exception):
    """What the caller's own code raises in the middle of ours."""


def _fails(*args: Any, **keywords: Any) -> NoReturn:
    raise CallersError("the caller's own")


class Silent:
    """Has no text, no length, no elements and no numbers, and says so loudly."""

    __str__ = __repr__ = __len__ = __iter__ = __getitem__ = __index__ = __float__ = __bool__ = (
        _fails
    )
    __hash__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _fails
    __getattr__ = _fails


class Loud(str):
    """A text whose methods fail."""

    __slots__ = ()
    encode = __str__ = __repr__ = __len__ = __iter__ = _fails


class Wide(int):
    """A number that has something else to say of itself."""

    __index__ = __float__ = __repr__ = __str__ = _fails


class Choice(enum.IntEnum):
    """A number by name."""

    ONE = 1


class Mapped(dict[Any, Any]):
    """A mapping that can't be read."""

    items = keys = values = __iter__ = _fails


def _failing() -> Iterator[Any]:
    yield "a/b/0/0/s"
    raise CallersError("the caller's own")


def _endless() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def _deep() -> Any:
    inside: Any = 1
    for _ in range(200):
        inside = [inside]
    return inside


SCALARS: Final[tuple[Callable[[], Any], ...]] = (
    lambda: "\ud835",
    lambda: "ok\udc00\ud800",
    lambda: "\0",
    lambda: "",
    lambda: " a\nb ",
    lambda: "x" * 100_000,
    lambda: "7",
    lambda: "nan",
    lambda: b"bytes",
    lambda: bytearray(b"bytes"),
    lambda: memoryview(b"bytes"),
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: -1,
    lambda: 2**31,
    lambda: 2**32,
    lambda: 2**63,
    lambda: 2**64,
    lambda: -(2**63) - 1,
    lambda: 10**5000,
    lambda: 1.5,
    lambda: -0.0,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1e308,
    lambda: 3 + 4j,
    lambda: decimal.Decimal("NaN"),
    lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    lambda: np.int64(3),
    lambda: np.float32("nan"),
    lambda: np.bool_(True),
    lambda: np.str_("x"),
    lambda: np.arange(3),
    lambda: torch.tensor(2),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: ValueError("\ud835"),
    lambda: Loud("loud"),
    lambda: Wide(3),
    lambda: Choice.ONE,
    lambda: object(),
    lambda: int,
    lambda: len,
    Silent,
)
CONTAINERS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda value: [value],
    lambda value: (value, value),
    lambda value: {"a": value},
    lambda value: {"a/b/0/0/s": value},
    lambda value: [["a", value]],
    lambda value: {"a/b/0/0/s": {"reward": value}},
    lambda value: {"a/b/0/0/s": {"values": value}},
    lambda value: {"a/b/0/0/s": {"info": {"k": value}}},
    lambda value: {"a/b/0/0/s": {"info": {"k": [value]}}},
    lambda value: {"version": 1, "buffer": "math", "consumer": value, "step": 3},
    lambda value: {"version": 1, "buffer": "math", "consumer": "trainer", "step": value},
    lambda value: (each for each in [value]),
    lambda value: iter([value]),
)
WHOLES: Final[tuple[Callable[[], Any], ...]] = (
    list,
    dict,
    set,
    _failing,
    _endless,
    _deep,
    lambda: Mapped(a=1),
    lambda: [*range(3)],
    lambda: {1: 2},
    lambda: {"\ud835": 1.0},
)
