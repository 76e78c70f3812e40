"""A digest of what an experience says, whatever bytes say it: of its content, but for its identity."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final

from experience_buffer._codec.item import Item
from experience_buffer._codec.orderless import orderless

DIGEST_BYTES: Final = 16
_SETS: Final = frozenset({set, frozenset})
_DEFAULTS: Final = {"prompt_length": 1}


def digest(item: Item) -> bytes:
    """16 bytes that are equal for equal content: of the tensors, bit by bit, and of the metadata.

    Neither the order of keys nor which objects are shared counts, a list is as good as a tuple and
    1.0 as 1, and what isn't there is the same as None or nothing in it.
    """
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    meta = _DEFAULTS | {key: value for key, value in item.meta.items() if key != "eid"}
    _add(hashed, {key: value for key, value in meta.items() if value not in (None, {}, [])})
    for name, view in sorted(item.tensors.items()):
        _add(hashed, [name, view.dtype, list(view.shape)])
        hashed.update(view.data)
    return hashed.digest()


def _add(hashed: hashlib.blake2b, value: Any) -> None:
    """Add a value, beginning with its kind and its length: so no two values give the same bytes."""
    kind = type(value)
    if kind is dict:
        hashed.update(b"{%d" % len(value))
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            _add(hashed, key)
            _add(hashed, value[key])
    elif kind is list or kind is tuple:
        hashed.update(b"[%d" % len(value))
        for member in value:
            _add(hashed, member)
    elif kind in _SETS:
        _add(hashed, list(orderless({*value})[1]))
    elif kind is float and not value.is_integer():
        hashed.update(b"f" + struct.pack(">d", value))
    elif kind is str or kind is bytes:
        data = value.encode("utf-8", "surrogatepass") if kind is str else value
        hashed.update(b"%s%d " % (kind.__name__[:1].encode(), len(data)))
        hashed.update(data)
    else:
        text = repr(int(value) if kind is float else value).encode()
        hashed.update(b"v%d " % len(text) + text)
