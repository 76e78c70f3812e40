"""Plain data of a payload, bounded: what rollouts wrote may be anything, and of any size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from experience_buffer._show import Shown

DEFAULT_CHARS: Final = 20_000
MOST_CHARS: Final = 2_000_000
_MOST_ENTRIES: Final = 20_000
"""Of all lists and dicts together."""
_MOST_DEPTH: Final = 40
_KEY_CHARS: Final = 200
_MOST_BITS: Final = 4096
"""Of a whole number; those with more take long to write."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cut(Shown):
    """Something that isn't shown whole.

    Attributes:
        path: Where, such as "messages.3.content".
        num_chars: Of the whole text; None for what is no text.
        num_entries: Of the whole list or dict; None for what is none.
    """

    path: str
    num_chars: int | None = None
    num_entries: int | None = None


class Bounded:
    """Copies plain data, and notes what it leaves out.

    Args:
        num_chars: The most of any text.
    """

    def __init__(self, num_chars: int = DEFAULT_CHARS) -> None:
        self._num_chars = num_chars
        self._left = _MOST_ENTRIES
        self._chars_left = max(4 * num_chars, MOST_CHARS)
        self.cuts: list[Cut] = []

    def text(self, value: Any, path: str) -> str | None:
        """A text; None of anything else."""
        if not isinstance(value, str):
            return None
        most = min(self._num_chars, self._chars_left)
        if len(value) > most:
            self.cuts.append(Cut(path=path, num_chars=len(value)))
        shown = value[:most]
        self._chars_left -= len(shown)
        return shown

    def plain(self, value: Any, path: str, depth: int = 0) -> Any:
        """A copy that JSON can hold, of what fits."""
        if isinstance(value, str):
            return self.text(value, path)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"num_bytes": len(value)}
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            room = self._room(len(value), path, depth)
            entries = enumerate(islice(value, room))
            return [self.plain(each, f"{path}.{i}", depth + 1) for i, each in entries]
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return f"a whole number of {value.bit_length()} bits"
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return str(value)[:_KEY_CHARS]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
        shown = {}
        for key, each in islice(value.items(), self._room(len(value), path, depth)):
            name = str(key)[:_KEY_CHARS]
            shown[name] = self.plain(each, f"{path}.{name}" if path else name, depth + 1)
        return shown

    def _room(self, num_entries: int, path: str, depth: int) -> int:
        room = 0 if depth >= _MOST_DEPTH else min(num_entries, self._left)
        self._left -= room
        if room < num_entries:
            self.cuts.append(Cut(path=path, num_entries=num_entries))
        return room
