"""What a pickle's opcodes work on: a stack, marks, a memo; each step checked before it is made.

The opcodes themselves are in `pickle_reader` and `pickle_opcodes`.
"""

from __future__ import annotations

from typing import Any

from experience_buffer._codec.codec_error import trxp_error
from experience_buffer._codec.limits import Limits
from experience_buffer._codec.pickle_foreign import Foreign
from experience_buffer._codec.plain_values import EXPENSIVE_KEY, MAX_FREE_KEYS, is_cheap_key, is_key
from experience_buffer.errors import TrxpError


class Machine:
    """The stack, memo and place of one `load`."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self.data = data
        self.limits = limits
        self.pos = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.marks: list[tuple[int, int]] = []
        self.fence = 0  # stack height at the innermost mark: nothing below may be taken
        self.is_suspect = False
        self.has_composites = False  # whether a tuple or frozenset, so a costly key, may exist
        self.num_made = 0  # characters and bytes of texts that no opcode spelled out
        self.num_sets = 0

    def error(self, message: str) -> TrxpError:
        return trxp_error(message, where=f"metadata offset {self.pos}")

    def finish(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise self.error("the pickle doesn't end with exactly one value")
        if self.pos != len(self.data):
            raise self.error(f"{len(self.data) - self.pos} bytes follow the end of the pickle")
        return self.stack[0]

    def take(self, count: int) -> list[Any]:
        """Take the topmost values, none from below the innermost mark."""
        height = len(self.stack) - count
        if height < self.fence:
            raise IndexError
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def take_marked(self) -> list[Any]:
        """Take the values since the innermost mark, and the mark."""
        values = self.take(len(self.stack) - self.fence)
        self.fence, _ = self.marks.pop()
        return values

    def top(self) -> Any:
        if len(self.stack) <= self.fence:
            raise IndexError
        return self.stack[-1]

    def skip(self, num_bytes: int) -> bytes:
        """Return the next bytes, which must all be there."""
        start = self.pos
        self.pos = start + num_bytes
        if self.pos > len(self.data):
            raise IndexError
        return self.data[start : self.pos]

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.skip(num_bytes), "little")

    def odd_text(self, start: int, end: int) -> str:
        """Decode text that holds lone surrogates, as JSON from a model may."""
        try:
            return self.data[start:end].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self.pos = start
            raise self.error("a text isn't UTF-8") from None

    def set_items(self, target: object, members: list[Any]) -> None:
        if len(members) % 2:
            raise self.error("a dict key without a value")
        if type(target) is dict:
            if self.has_composites or len(members) + 2 * len(target) > 2 * MAX_FREE_KEYS:
                self.check_keys(members[::2], len(members) // 2 + len(target))
            for begin in range(0, len(members), 2 * MAX_FREE_KEYS):
                part = members[begin : begin + 2 * MAX_FREE_KEYS]
                expected = len(target) + len(part) // 2
                pairs = iter(part)
                target.update(zip(pairs, pairs, strict=True))
                self.check_size(target, expected)
        elif not isinstance(target, Foreign):
            raise self.error(f"items set on a {type(target).__name__}")

    def fill_set(self, target: set[Any], members: list[Any]) -> set[Any]:
        """Add members to a set; returns it."""
        self.check_keys(members, len(members) + len(target))
        for begin in range(0, len(members), MAX_FREE_KEYS):
            part = members[begin : begin + MAX_FREE_KEYS]
            expected = len(target) + len(part)
            target.update(part)
            self.check_size(target, expected)
        return target

    def check_size(self, target: dict[Any, Any] | set[Any], expected: int) -> None:
        """Refuse a key that is set twice, which no pickle of a dict or set does.

        Two equal texts that are not one object are compared to their ends each time; a sender
        could ask for that with every few bytes.
        """
        if len(target) != expected:
            raise self.error(f"a key of a {type(target).__name__} is given twice")

    def memoizable(self, value: object) -> object:
        """The value, unless it is an integer of more than 64 bits.

        Picklers keep none in the memo, and write it out wherever it is reached: a kilobyte for two
        bytes.
        """
        if type(value) is int and value.bit_length() > 64:
            raise self.error("an integer of more than 64 bits is kept in the memo")
        return value

    def extend(self, target: object, members: list[Any]) -> None:
        if type(target) is list:
            target.extend(members)
        elif not isinstance(target, Foreign):
            raise self.error(f"members appended to a {type(target).__name__}")

    def check_keys(self, keys: list[Any], num_keys: int) -> None:
        """Refuse keys whose hashing or comparing a sender could make expensive."""
        for key in keys:
            if not is_key(key) and not isinstance(key, Foreign):
                raise self.error(
                    f"a {type(key).__name__} is used as a key; use None, bool, int, float, str, "
                    "bytes or a flat tuple of these (integers in it: 64 bits)"
                )
            if num_keys > MAX_FREE_KEYS and not is_cheap_key(key):
                raise self.error(EXPENSIVE_KEY)
