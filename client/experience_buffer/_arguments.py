"""What callers give, checked: errors name the argument, the value, and what was expected. Pure."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from experience_buffer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import DataclassInstance

Table: TypeAlias = Mapping[str, Any]
"""A value's fields by name, which becomes that value: a table of TOML is one, too."""
T = TypeVar("T", bound="DataclassInstance")
Held = TypeVar("Held")

if TYPE_CHECKING:

    class Like(Generic[Held]):
        """A field that is read as one value, and may be given as a table of it or as a text."""

        def __get__(self, owner: object, kind: type | None = None) -> Held: ...
        def __set__(self, owner: object, value: Held | str | Table) -> None: ...

    class Several(Generic[Held]):
        """A field of several such values, or None."""

        def __get__(self, owner: object, kind: type | None = None) -> tuple[Held, ...] | None: ...
        def __set__(self, owner: object, value: Sequence[Held | str | Table] | None) -> None: ...


NONE: Final[Any] = None
"""The default of such a field."""
_MOST_CHARS: Final = 80
_TELLING: Final = (str, bool, int, float, type(None))
"""Whose text says of which type they are."""


def refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    """Make the error of an argument that is something else than wanted."""
    return InvalidRequestError(f"{name} is {shown(value)}; give {wanted}", subject=name)


def shown(value: object) -> str:
    """A value as errors repeat it: cut, and with its type where its text may not tell it."""
    text, kind = repr(value), type(value)
    if len(text) > _MOST_CHARS:
        text = f"{text[: _MOST_CHARS - 1]}…"
    return text if kind in _TELLING or kind.__name__ in text else f"{text} ({kind.__name__})"


def misspelt(name: object, known: Iterable[str]) -> str:
    """What to do about a name that isn't known: the one that it is near to, or all there are."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"give some of {', '.join(names)}"


def made(kind: type[T], value: object, where: str, *, alone: str = "") -> T:
    """A value of settings, as it is or as TOML has it: a table of its fields, or one of them alone.

    Args:
        kind: Its dataclass.
        value: The value; a mapping; or, with `alone`, a text.
        where: The argument, for errors.
        alone: The field that a text alone stands for; empty: none does.

    Raises:
        InvalidRequestError: It is something else, has a field that there isn't, or lacks one.
    """
    if isinstance(value, kind):
        return value
    if alone and isinstance(value, str):
        value = {alone: value}
    if not isinstance(value, Mapping):
        forms = f"{kind.__name__}(...) or a dict of its fields"
        raise refused(where, value, f"{forms}, or its {alone} as text" if alone else forms)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise InvalidRequestError(
                f"{where} has no field {name!r}; {misspelt(name, fields)}", subject=where
            )
    for name, field in fields.items():
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        if is_needed and name not in value:
            raise InvalidRequestError(f"{where} lacks {name!r}; give it", subject=where)
    return kind(**value)


def check_whole(name: str, value: Any, *, least: int = 0, hint: str = "") -> None:
    """Check a whole number.

    Args:
        name: The argument.
        value: What was given.
        least: What it may be at least.
        hint: Ends the error: what is best, or what else may be given.

    Raises:
        InvalidRequestError: It is none, or less.
    """
    try:
        is_fine = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        is_fine = False
    if not is_fine:
        raise refused(name, value, f"a whole number of at least {least}{hint}")


def check_number(name: str, value: Any, *, least: float = 0.0, is_open: bool = False) -> None:
    """Check a real number.

    Args:
        name: The argument.
        value: What was given.
        least: What it may be at least.
        is_open: True: it has to be above that.

    Raises:
        InvalidRequestError: It is none, NaN, or less.
    """
    try:
        given = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        given = math.nan
    if not (given > least if is_open else given >= least):
        raise refused(name, value, f"a number {'above' if is_open else 'of at least'} {least:g}")


def is_list(value: Any) -> bool:
    """Whether it is several of something, in an order: a list, a tuple, an array."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return False
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def texts(name: str, value: Any, wanted: str) -> list[str]:
    """One text or several, as a list.

    Raises:
        InvalidRequestError: It is neither; the error names the entry.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise refused(name, value, wanted)
    entries = list(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise refused(f"{name}[{index}]", entry, wanted)
    return entries
