"""Whether two payloads say the same of one experience, though their bytes differ. Pure.

Bytes differ by what isn't content: which equal texts were one object to the sender, the order of a
dict's keys and of tensors, the spaces of a table, a tuple that was a list in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import xxhash

from experience_buffer import trxp
from experience_buffer._codec.codec_error import shown
from experience_buffer._codec.orderless import orderless
from experience_buffer.errors import TrxpError
from experience_buffer.trxp import Item, TensorView
from experience_buffer_server.buffer.intake.annotation import REPLACEABLE

_DEFAULTS: Final[Mapping[str, Any]] = {"prompt_length": 1}
"""What is meant where it isn't there, if it isn't None."""
_EMPTY: Final = frozenset({"info", "metrics", "custom_fields", "multi_modal_input_keys"})
"""None and nothing in it are the same of these."""
_MAX_SHARED_VALUES: Final = 50_000
_NO_BOUND: Final = 2**62
_SEQUENCES: Final = frozenset({list, tuple})
"""JSON has no tuples."""
_SETS: Final = frozenset({set, frozenset})
_NUMBERS: Final = frozenset({int, float})


def difference(stored: bytes, pushed: bytes, *, annotated: bool) -> str:
    """Say what a payload of an experience has otherwise than the one that is stored.

    Args:
        stored: As it is stored.
        pushed: What came under the same uid.
        annotated: What is stored was annotated since it was pushed: what an annotation may have
            brought isn't compared.

    Returns:
        The first field that differs, in words; empty where all content is the same.

    Raises:
        TrxpError: One of them can't be read.
    """
    here, new = _item(stored), _item(pushed)
    return (
        _eid_difference(here, new)
        or _meta_difference(here, new, annotated=annotated)
        or _tensor_difference(here.tensors, new.tensors, annotated=annotated)
    )


def digest_of(payload: bytes) -> bytes:
    """The digest that a payload has when it is pushed; of one without sets, that of its bytes.

    Raises:
        TrxpError: It can't be read.
    """
    other = _item(payload).orderless()
    return xxhash.xxh3_128_digest(payload if other is None else other)


def digests_alike(payload: bytes) -> Iterator[bytes]:
    """Digests that the same content may have had when it was pushed, where only that is known of it.

    As it is when all equal texts are one object, which is so of those that code spells out; and when
    only keys are, as after a JSON file was read.

    Raises:
        TrxpError: It can't be read.
    """
    item = _item(payload)
    if item.is_suspect:
        return  # What shares containers is larger than it looks.
    for shares_values in (True, False):
        shared = {key: key for key in item.keys}
        meta = _shared(item.meta, shared.setdefault, shares_values=shares_values)
        yield digest_of(replace(item, meta=meta).encode())


def _shared(value: Any, first: Callable[[str, str], str], *, shares_values: bool) -> Any:
    """Plain data anew: of equal texts the first, but for values of their own where those aren't shared."""
    kind = type(value)
    if kind is str:
        # Python has those of one character once only, wherever they come from.
        return first(value, value) if shares_values else value[:1] + value[1:]
    if kind is dict:
        return {
            first(key, key) if type(key) is str else key: _shared(
                member, first, shares_values=shares_values
            )
            for key, member in value.items()
        }
    if kind is list:
        return [_shared(member, first, shares_values=shares_values) for member in value]
    return value


def _item(payload: bytes) -> Item:
    (item,) = trxp.read(payload)
    if isinstance(item, TrxpError):
        raise item
    return item


def _eid_difference(stored: Item, pushed: Item) -> str:
    """Numbers and their texts name the same; a `/` in them may hide another batch and task."""
    for name in ("batch", "task"):
        here, new = getattr(stored.eid, name), getattr(pushed.eid, name)
        if str(here) != str(new):
            return f"its {name} is {shown(here)} there, and {shown(new)} here"
    return ""


def _meta_difference(stored: Item, pushed: Item, *, annotated: bool) -> str:
    # What shares containers is larger than it looks; what doesn't takes no longer than reading it did.
    budget = [_MAX_SHARED_VALUES if stored.is_suspect or pushed.is_suspect else _NO_BOUND]
    for name in dict.fromkeys((*stored.meta, *pushed.meta)):
        if name == "eid" or (annotated and name == "reward"):
            continue
        default = _DEFAULTS.get(name)
        here, new = stored.meta.get(name, default), pushed.meta.get(name, default)
        if name in _EMPTY:
            here, new = here or None, new or None
        if annotated and name == "info" and isinstance(here, dict) and isinstance(new, dict):
            here = {key: value for key, value in here.items() if key in new}
            new = {key: value for key, value in new.items() if key in here}
        try:
            if unlike := _unlike(here, new, budget):
                return f"its {name}{unlike}"
        except _TooMuchError:
            return f"its {name} has more values than are compared"
    return ""


def _tensor_difference(
    stored: Mapping[str, TensorView], pushed: Mapping[str, TensorView], *, annotated: bool
) -> str:
    for name in sorted({*stored, *pushed}):
        here, new = stored.get(name), pushed.get(name)
        if annotated and (name in REPLACEABLE or new is None):
            continue
        if here is None or new is None:
            return f"its {name} is {'missing there' if here is None else 'missing here'}"
        if (here.dtype, tuple(here.shape)) != (new.dtype, tuple(new.shape)):
            there = f"{here.dtype} of shape {list(here.shape)}"
            return f"its {name} is {there} there, and {new.dtype} of {list(new.shape)} here"
        if here.data != new.data:
            return f"its {name} has other values"
    return ""


class _TooMuchError(Exception):
    """More values than the budget allows."""


def _unlike(here: Any, new: Any, budget: list[int]) -> str:
    """Where two values of plain data differ, as a path and both; empty where they are alike.

    Raises:
        _TooMuchError: The budget is spent.
    """
    kind, other = type(here), type(new)
    budget[0] -= 1
    if budget[0] < 0:
        raise _TooMuchError
    if kind is dict and other is dict:
        return _unlike_members(here, new, sorted({*here, *new}, key=str), budget)
    if kind in _SEQUENCES and other in _SEQUENCES:
        if len(here) != len(new):
            return f" has {len(here)} values there, and {len(new)} here"
        pairs = enumerate(zip(here, new, strict=True))
        return next((f"[{i}]{words}" for i, pair in pairs if (words := _unlike(*pair, budget))), "")
    if kind in _SETS and other in _SETS:
        # Sorted the same way, whatever order they have.
        return _unlike(orderless({*here})[1], orderless({*new})[1], budget)
    if kind in _NUMBERS and other in _NUMBERS:
        is_same = here == new or (here != here and new != new)
    else:
        is_same = kind is other and here == new
    return "" if is_same else f" is {shown(here)} there, and {shown(new)} here"


def _unlike_members(
    here: dict[Any, Any], new: dict[Any, Any], keys: Sequence[Any], budget: list[int]
) -> str:
    for key in keys:
        path = f"[{shown(key)}]"
        if key not in here or key not in new:
            return f"{path} is {'missing there' if key not in here else 'missing here'}"
        if words := _unlike(here[key], new[key], budget):
            return path + words
    return ""
