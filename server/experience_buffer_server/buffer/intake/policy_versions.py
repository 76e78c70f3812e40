"""The policy versions that an experience says it was made by, and what is said of one that doesn't.

Pure; what becomes of versions is `sampling/staleness.py`'s business, and that of consumers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from experience_buffer._codec.codec_error import shown
from experience_buffer.trxp import Item, TensorView
from experience_buffer_server.advantages.experience_inputs import info_of

Versions = tuple[int | None, int | None]
"""Lowest and highest; None: unknown."""

_INTEGER_CODES: Final = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
_MAX_SHOWN: Final = 3
_MAX_NAME_CHARS: Final = 40
_LIKENESS: Final = 0.75
_KEYS: Final = frozenset({"model_version", "version_start", "version_end"})
_LETTERS: Final = ("modelversion", "versionstart", "versions")


def policy_versions(item: Item) -> Versions | str:
    """Lowest and highest policy version, from per-token versions or from `info`; or what is wrong."""
    tensor = item.tensors.get("versions")
    if tensor is not None:
        return tensor_versions(tensor)
    info = info_of(item)
    first = "version_start" if "version_start" in info else "model_version"
    last = "version_end" if "version_end" in info else first
    start, end = info.get(first), info.get(last)
    if type(start) is int and type(end) is int and 0 <= start <= end < 2**63:
        return start, end
    for name, value in ((first, start), (last, end)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            return f"info[{name!r}] is {shown(value)}; a policy version is a whole number, an int"
        if value is not None and not -(2**63) <= value < 2**63:
            return f"info[{name!r}] is {shown(value)}; a policy version has 64 bits"
    known = [value for value in (start, end) if value is not None and value >= 0]
    return (min(known), max(known)) if known else (None, None)


def tensor_versions(tensor: TensorView) -> Versions | str:
    """Lowest and highest version of any token; those below 0 are unknown."""
    code = _INTEGER_CODES.get(tensor.dtype)
    if code is None:
        return (
            f"versions has dtype {tensor.dtype}; an integer dtype is expected, one of "
            f"{', '.join(_INTEGER_CODES)}"
        )
    # A response has thousands: as Python's numbers they take longer than everything else here.
    values = np.frombuffer(tensor.data, dtype=code)
    highest = int(values.max()) if len(values) else -1
    if highest < 0:
        return None, None
    return int(values.min(where=values >= 0, initial=highest)), highest


def is_future(version: int | None, published: int | None) -> bool:
    """Whether a policy version is newer than the published one."""
    return version is not None and published is not None and version > published


def is_begun_by_nobody(item: Item) -> bool:
    """Whether nothing says which version began it: its lag can't be told then.

    Where `info` says how it ended and not how it began, `policy_versions` knows the end alone.
    """
    if "versions" in item.tensors:
        return False
    info = info_of(item)
    start = info.get("version_start", info.get("model_version"))
    return start is None or start < 0


def explain_unversioned(item: Item, window: str) -> str:
    """Say what is missing, where it may have been said instead, and what to do.

    Args:
        item: An experience without policy version.
        window: The bound that is judged by it, in words.
    """
    return (
        f"its policy version isn't known: {_what_is_there(item)}, and {window} is judged by it"
        f'{_near_misses(item)} info={{"model_version": N}}, or versions with one per token, or '
        'have the buffer deliver what has none (on_missing_version = "deliver")'
    )


def _what_is_there(item: Item) -> str:
    if "versions" in item.tensors:
        return "no token has a version of 0 or more"
    info = info_of(item)
    name = "version_start" if {"version_start", "version_end"} & info.keys() else "model_version"
    if info.get(name) is None:
        return f"info[{name!r}] is missing"
    return f"info[{name!r}] is {shown(info[name])}"


def _near_misses(item: Item) -> str:
    """Where somebody may have said it under another name, as a question; and what to do begins."""
    metrics = item.meta.get("metrics")
    places = [
        *(f"info[{name!r}]" for name in _alike(info_of(item), _KEYS)),
        *(f"metrics[{name!r}]" for name in _alike(metrics if isinstance(metrics, dict) else ())),
        *(f"the tensor {name!r}" for name in _alike(item.tensors, {"versions"})),
    ]
    return f"; did you mean it by {' or '.join(places[:_MAX_SHOWN])}? Set" if places else "; set"


def _alike(names: Iterable[Any], known: Iterable[str] = ()) -> Iterator[str]:
    """Texts that may stand for a policy version and aren't read as one."""
    for name in names:
        if not isinstance(name, str) or name in known or len(name) > _MAX_NAME_CHARS:
            continue
        letters = "".join(filter(str.isalpha, name.lower()))
        if "version" in letters or difflib.get_close_matches(letters, _LETTERS, 1, _LIKENESS):
            yield name
