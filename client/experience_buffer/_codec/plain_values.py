"""Which values metadata may hold, and the walk that finds the others and says where they are.

Both directions pass here: what a sender's pickle held, and what an experience is about to write.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from experience_buffer._codec.codec_error import shown, trxp_error
from experience_buffer._codec.limits import Limits
from experience_buffer._codec.pickle_foreign import Foreign
from experience_buffer.errors import TrxpError

MAX_INT_BYTES: Final = 1024
"""Size of the largest integer; Python prints up to 4,300 digits, which is 1,785 bytes."""

MAX_FREE_KEYS: Final = 256
"""Members of a dict or set whose kind of key isn't restricted; of more, see `is_cheap_key`."""

EXPENSIVE_KEY: Final = (
    f"a dict or set of more than {MAX_FREE_KEYS} members has a key that isn't text, bytes or a "
    "32-bit integer; use text keys"
)
_INT32: Final = 2**31
_MAX_KEY_PARTS: Final = 64
_MAX_PATH: Final = 1000
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: Final = frozenset({dict, list, tuple, set, frozenset})
_CURES: Final = (
    ("numpy", "send value.tolist(), or a tensor in `extra`"),
    ("torch", "send float(value) or value.tolist(), or put the tensor in `extra`"),
    ("datetime", "send value.isoformat()"),
    ("collections", "send dict(value) or list(value)"),
    ("builtins.complex", "send [value.real, value.imag]"),
    ("builtins.bytearray", "send bytes(value)"),
    ("PIL", "send its pixels in `multi_modal_inputs`"),
)


class _NotPlainError(Exception):
    """A value that may not be sent; `trail` is filled in on the way out, innermost first."""

    def __init__(self, reason: str, *, is_of_depth: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_of_depth = is_of_depth
        """It is about where the value is, not about the value itself."""
        self.trail: list[object] = []

    def copy(self) -> _NotPlainError:
        """The same refusal, whose trail goes on apart."""
        other = _NotPlainError(self.reason)
        other.trail = list(self.trail)
        return other


class _Walked(NamedTuple):
    """What became of a container that was walked to its end, or to what isn't plain in it."""

    container: Any
    """Kept, so that its id names nothing else."""
    normal: Any
    height: int
    """How much deeper than itself its members go."""
    num_nodes: int
    refusal: _NotPlainError | None


def is_key(key: object) -> bool:
    """Whether a value may be a dict key or set member: a scalar, or a short flat tuple of scalars.

    Integers in a tuple have 64 bits at most.
    """
    kind = type(key)
    if kind is not tuple:
        return kind in _SCALARS
    # A tuple is hashed from its parts each time it is used.
    parts: tuple[object, ...] = key  # type: ignore[assignment]
    return len(parts) <= _MAX_KEY_PARTS and all(
        type(part) in _SCALARS and (type(part) is not int or part.bit_length() <= 64)
        for part in parts
    )


def is_cheap_key(key: object) -> bool:
    """Whether a dict or set may have any number of such keys: none makes hashing expensive."""
    kind = type(key)
    return kind is str or kind is bytes or (kind is int and -_INT32 <= key < _INT32)  # type: ignore[operator]


class Normaliser:
    """Walks the metadata of one payload's experiences; counts what it visits across all of them.

    Not to be shared between threads.
    """

    __slots__ = ("_budget", "_deepest", "_limits", "_walked")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._budget = limits.max_nodes
        self._deepest = 0
        self._walked: dict[int, _Walked] = {}

    def normal(self, value: Any, *, index: int) -> Any:
        """Return an item's metadata as plain data, the very same object if it is that already.

        NumPy scalars become Python's.

        Raises:
            TrxpError: A value isn't plain data or is nested too deeply (of that item), or all
                items together reach more than `max_nodes` values (of the whole payload).
        """
        try:
            return self._normal(value, 1)
        except _NotPlainError as refusal:
            raise _refused(refusal, index) from None

    def _normal(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is str or value is None or kind is float or kind is bool or kind is bytes:
            return value
        if kind is int:
            if value.bit_length() >= 8 * MAX_INT_BYTES:
                raise _NotPlainError(f"an integer of more than {MAX_INT_BYTES} bytes; send text")
            return value
        if kind in _CONTAINERS:
            return self._normal_container(value, depth)
        return _unwrapped(value)

    def _normal_container(self, value: Any, depth: int) -> Any:
        """Walk a container once, however often it is reached; count it each time.

        What is reached a million times may be stored once: walking it each time would let a few
        hundred bytes take a tenth of a second.
        """
        known = self._walked.get(id(value))
        if known is not None:
            if depth + known.height > self._limits.max_depth:
                raise self._too_deep()
            self._spend(known.num_nodes)
            if known.refusal is not None:
                raise known.refusal.copy()
            return known.normal
        budget, outer_deepest, self._deepest = self._budget, self._deepest, depth
        refusal, normal = None, None
        self._enter(value, depth)
        try:
            normal = self._normal_members(value, depth)
        except _NotPlainError as error:
            if error.is_of_depth:
                raise
            refusal = error.copy()
            raise
        finally:
            height, self._deepest = self._deepest - depth, max(self._deepest, outer_deepest)
            if normal is not None or refusal is not None:
                self._walked[id(value)] = _Walked(
                    value, normal, height, budget - self._budget, refusal
                )
        return normal

    def _normal_members(self, value: Any, depth: int) -> Any:
        if type(value) is dict:
            return self._normal_dict(value, depth)
        if type(value) is list or type(value) is tuple:
            return self._normal_sequence(value, depth)
        is_large = len(value) > MAX_FREE_KEYS
        for member in value:
            self._check_key(member, is_large)
        return value

    def _enter(self, container: Any, depth: int) -> None:
        if depth > self._limits.max_depth:
            raise self._too_deep()
        self._spend(len(container) + 1)

    def _too_deep(self) -> _NotPlainError:
        return _NotPlainError(
            f"nested more than {self._limits.max_depth} deep (max_metadata_depth), or holds "
            "itself; flatten it",
            is_of_depth=True,
        )

    def _spend(self, num_nodes: int) -> None:
        self._budget -= num_nodes
        if self._budget < 0:
            raise trxp_error(
                f"more than {self._limits.max_nodes:,} values (max_metadata_nodes), shared ones "
                "counted as often as they are reached; send smaller batches",
                where="metadata",
            )

    def _normal_dict(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        changed = None
        is_large = len(value) > MAX_FREE_KEYS
        key: object = None
        try:
            for key, member in value.items():
                if type(key) is not str:
                    self._check_key(key, is_large)
                normal = self._normal(member, depth + 1)
                if normal is not member:
                    changed = dict(value) if changed is None else changed
                    changed[key] = normal
        except _NotPlainError as refusal:
            refusal.trail.append(key)
            raise
        return value if changed is None else changed

    def _normal_sequence(self, value: Any, depth: int) -> Any:
        changed = None
        position = 0
        try:
            for position, member in enumerate(value):
                normal = self._normal(member, depth + 1)
                if normal is not member:
                    changed = list(value) if changed is None else changed
                    changed[position] = normal
        except _NotPlainError as refusal:
            refusal.trail.append(position)
            raise
        return value if changed is None else type(value)(changed)

    def _check_key(self, key: object, is_large: bool) -> None:
        if not is_key(key):
            raise _NotPlainError(
                f"a key or set member of type {_name(key)}; use None, bool, int, float, str, "
                "bytes or a flat tuple of these (integers in it: 64 bits)"
            )
        if is_large and not is_cheap_key(key):
            raise _NotPlainError(EXPENSIVE_KEY)
        for part in key if type(key) is tuple else (key,):
            self._normal(part, 1)


def _unwrapped(value: Any) -> object:
    """Return a NumPy scalar as Python's; NumPy itself is never imported for it."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        plain = value.item()
        if type(plain) in _SCALARS and type(value).__name__ != "ndarray":
            return plain
    raise _NotPlainError(_not_plain(_name(value)))


def _name(value: object) -> str:
    if isinstance(value, Foreign):
        return value.name
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _not_plain(name: str) -> str:
    cure = next((cure for prefix, cure in _CURES if name.startswith(prefix)), None)
    cure = cure or "send None, bool, int, float, str, bytes, list, tuple, dict or set"
    return f"{name} isn't plain data; {cure}"


def _is_short_name(step: object) -> bool:
    return isinstance(step, str) and len(step) <= 80 and step.isidentifier()


def _refused(refusal: _NotPlainError, index: int) -> TrxpError:
    trail = refusal.trail[::-1]
    path = "".join(f".{step}" if _is_short_name(step) else f"[{shown(step)}]" for step in trail)
    path = path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
    reason = refusal.reason
    if trail == ["reward"]:
        reason += "; a reward is sent as float(reward)"
    return trxp_error(reason, where=f"items[{index}]{path}", item=index)
