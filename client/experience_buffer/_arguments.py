"""What callers give, checked: errors name the argument, the value, and what was expected. Pure."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
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
MOST_INT: Final = 2**63 - 1
_IN_ORDER: Final = ("__getitem__", "__len__")
_LONG: Final = (str, bytes, bytearray)
_FLAGS: Final = (("numpy", "bool"), ("numpy", "bool_"))
_TELLING: Final = (str, bool, int, float, type(None), list, tuple, dict, set)
"""Whose text says of which type they are."""


def refused(name: str, value: object, wanted: str) -> InvalidRequestError:
    """Make the error of an argument that is something else than wanted."""
    return InvalidRequestError(f"{name} is {shown(value)}; give {wanted}", subject=name)


def shown(value: Any) -> str:
    """A value as errors repeat it: cut, and with its type where its text may not tell it."""
    kind = type(value)
    try:
        text = repr(value[:_MOST_CHARS] if kind in _LONG else value)
    except Exception as error:  # The caller's own class, or an integer of too many digits.
        return f"a {kind.__name__} that can't be shown ({type(error).__name__})"
    text = text.encode("ascii", "backslashreplace").decode() if _is_half_pair(text) else text
    if len(text) > _MOST_CHARS:
        text = f"{text[: _MOST_CHARS - 1]}…"
    return text if kind in _TELLING or kind.__name__ in text else f"{text} ({kind.__name__})"


def _is_half_pair(text: str) -> bool:
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return True
    return False


def as_text(name: str, value: Any, wanted: str = "text") -> str:
    """A text, as plain one.

    Raises:
        InvalidRequestError: It is none, or UTF-8 can't hold it.
    """
    if not isinstance(value, str):
        raise refused(name, value, wanted)
    if _is_half_pair(value):
        raise InvalidRequestError(
            f"{name} is {shown(value)}, which has half of a surrogate pair; give text that UTF-8 "
            "can hold",
            subject=name,
        )
    # Not str(), which a class of the caller's may answer as it likes.
    return str.__str__(value)


def check_text(name: str, value: Any, *, most: int = MOST_INT) -> None:
    """See that a value is a text of at most so many characters.

    Raises:
        InvalidRequestError: It isn't.
    """
    if len(as_text(name, value)) > most:
        raise refused(name, value, f"at most {most} characters")


def as_words(name: str, value: Any) -> str:
    """A text that people read, such as a reason: what UTF-8 can't hold of it becomes U+FFFD.

    Raises:
        InvalidRequestError: It is none.
    """
    if not isinstance(value, str):
        raise refused(name, value, "text, such as str(error)")
    return str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def misspelt(name: object, known: Iterable[str], *, else_: str = "") -> str:
    """What to do about a name that isn't known: the one that it is near to, or all there are.

    Args:
        name: What was given.
        known: Those that there are.
        else_: What to do where it is near to none, in place of all there are.
    """
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    return f"did you mean {near[0]!r}?" if near else else_ or f"give some of {', '.join(names)}"


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
    value = dict(pairs(where, value, "a dict of its fields"))
    for name in value:
        if name not in fields:
            raise InvalidRequestError(
                f"{where} has no field {shown(name)}; {misspelt(name, fields)}", subject=where
            )
    for name, field in fields.items():
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        if is_needed and name not in value:
            raise InvalidRequestError(f"{where} lacks {name!r}; give it", subject=where)
    return kind(**value)


def check_whole(
    name: str, value: Any, *, least: int = 0, most: int = MOST_INT, hint: str = ""
) -> None:
    """Check a whole number.

    Args:
        name: The argument.
        value: What was given.
        least: What it may be at least.
        most: And at most.
        hint: Ends the error: what is best, or what else may be given.

    Raises:
        InvalidRequestError: It is none, or out of bounds.
    """
    bounds = f"of at least {least}" if most >= MOST_INT else f"from {least} to {most}"
    as_whole(name, value, least=least, most=most, wanted=f"a whole number {bounds}{hint}")


def as_whole(name: str, value: Any, *, least: int, most: int, wanted: str) -> int:
    """A whole number, as plain one: an `int`, or another library's; no truth value.

    Raises:
        InvalidRequestError: It is none, or out of bounds.
    """
    try:
        number = least - 1 if isinstance(value, bool) else int(operator.index(value))
    except Exception:  # The caller's own class, or a tensor of several elements.
        number = least - 1
    if not least <= number <= most:
        raise refused(name, value, wanted)
    return number


def as_flag(name: str, value: Any) -> bool:
    """A truth value, as plain one: a `bool`, or NumPy's.

    Raises:
        InvalidRequestError: It is none.
    """
    kind = type(value)
    if kind is not bool and (kind.__module__, kind.__name__) not in _FLAGS:
        raise refused(name, value, "True or False")
    return bool(value)


def as_number(name: str, value: Any, wanted: str = "a number", *, is_any: bool = False) -> float:
    """A real number, as plain one; no truth value, no text.

    Args:
        name: The argument.
        value: What was given.
        wanted: What to give instead.
        is_any: True: it may be NaN, too.

    Raises:
        InvalidRequestError: It is none, or NaN.
    """
    found = None
    if not isinstance(value, (str, bytes, bytearray, bool)):
        try:
            found = float(value)
        except Exception:  # The caller's own class, or a tensor of several elements.
            found = None
    if found is None or (math.isnan(found) and not is_any):
        raise refused(name, value, wanted)
    return found


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
    wanted = f"a number {'above' if is_open else 'of at least'} {least:g}"
    given = as_number(name, value, wanted)
    if not (given > least if is_open else given >= least):
        raise refused(name, value, wanted)


def check_path(name: str, value: Any) -> None:
    """Check a file's path, or that there is none.

    Raises:
        InvalidRequestError: It is something else.
    """
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise refused(name, value, "a file's path")


def is_list(value: Any) -> bool:
    """Whether it is several of something, in an order: a list, a tuple, an array."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return False
    names = {name for kind in type(value).__mro__ for name in _IN_ORDER if name in vars(kind)}
    try:
        # The shape is that of a tensor of one number.
        return len(names) == len(_IN_ORDER) and getattr(value, "shape", None) != ()
    except Exception:  # The caller's own class.
        return False


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """What is iterated over once, as a list.

    Raises:
        InvalidRequestError: It is a text, can't be iterated over, or fails meanwhile.
    """
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        raise refused(name, value, wanted)
    try:
        return list(value)
    except Exception as error:  # The caller's own: a generator that fails, say.
        if isinstance(error, TypeError):
            raise refused(name, value, wanted) from None
        raise InvalidRequestError(
            f"{name} fails while it is read, by {type(error).__name__}; give {wanted}", subject=name
        ) from error


def pairs(name: str, value: Any, wanted: str) -> list[tuple[Any, Any]]:
    """What a mapping holds.

    Raises:
        InvalidRequestError: It is none, or fails while it is read.
    """
    if not isinstance(value, Mapping):
        raise refused(name, value, wanted)
    return listed(name, _Items(value), wanted)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Several names; one text is a sequence of texts, too, and never meant.

    Raises:
        InvalidRequestError: It is one text, or something else; the error names the entry.
    """
    if isinstance(value, str):
        raise refused(name, value, f"a list of names: {name}=[{shown(value)}]")
    return tuple(texts(name, value, "a list of names"))


class _Items:
    """The items of a mapping, asked for only when they are iterated over."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._mapping = mapping

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._mapping.items())


def texts(name: str, value: Any, wanted: str) -> list[str]:
    """One text or several, as a list.

    Raises:
        InvalidRequestError: It is neither; the error names the entry.
    """
    if isinstance(value, str):
        return [as_text(name, value)]
    if isinstance(value, Mapping):
        raise refused(name, value, wanted)
    entries = listed(name, value, wanted)
    return [as_text(f"{name}[{index}]", entry, wanted) for index, entry in enumerate(entries)]
