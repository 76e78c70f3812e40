"""JSON schemas of the client's values, from their fields' types and docstrings.

Two kinds of numbers can be text: floats that JSON hasn't ("NaN", "Infinity", "-Infinity"), and whole numbers
beyond 2**53 - 1, which JavaScript would round.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from experience_buffer import advice, consumer_options, history, looking, options, stats, values

Kind: TypeAlias = type[Any]
_MODULES: Final = (consumer_options, options, stats, looking, history, values, advice)
NUMBER: Final = "Number"
WHOLE: Final = "Whole"
_PLAIN: Final[dict[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"$ref": f"#/components/schemas/{WHOLE}"},
    float: {"$ref": f"#/components/schemas/{NUMBER}"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    dict: {"type": "object"},
}
_BASIC: Final[dict[str, dict[str, Any]]] = {
    NUMBER: {
        "description": "A number; as text where JSON has none for it.",
        "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
    },
    WHOLE: {
        "description": "A whole number; as text beyond 2**53 - 1, which JavaScript would round.",
        "anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]{16,}$"}],
    },
    "Problem": {
        "type": "object",
        "description": "Why a request failed, as gRPC has it.",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["status", "reason", "message", "subject", "retry_delay_seconds"],
                "properties": {
                    "status": {"type": "string", "description": "The status of gRPC."},
                    "reason": {
                        "type": "string",
                        "description": "What it is, in a word: of the client's errors the `reason`.",
                    },
                    "message": {"type": "string", "description": "What is wrong and what to do."},
                    "subject": {"type": "string", "description": "What it is about."},
                    "retry_delay_seconds": {
                        "anyOf": [_PLAIN[float], {"type": "null"}],
                        "description": "When the same may be asked again; null: that can't help.",
                    },
                },
            }
        },
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page of values under a name, with the token of the next."""

    name: str
    kind: Kind
    has_token: bool = True


def schema_of(gives: Kind | Page) -> dict[str, Any]:
    """The schema of an answer."""
    if not isinstance(gives, Page):
        return _reference(gives)
    properties: dict[str, Any] = {gives.name: {"type": "array", "items": _reference(gives.kind)}}
    if gives.has_token:
        properties["next_page_token"] = {
            "type": "string",
            "description": "For the next page; empty on the last.",
        }
    return {"type": "object", "required": list(properties), "properties": properties}


def _reference(kind: Any) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def components(kinds: Sequence[Kind]) -> dict[str, Any]:
    """The schemas of these values and of all that they hold, by name."""
    found: dict[str, Any] = {}
    names = {name: each for module in _MODULES for name, each in vars(module).items()}
    names |= {"Sequence": Sequence, "Mapping": Mapping, "Like": _Like, "Several": _Several}
    for kind in kinds:
        _add(kind, found, names)
    return _BASIC | dict(sorted(found.items()))


class _Like:
    """What a field reads as that can be given in other ways, too."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return kind


class _Several:
    """What a field reads as that one can be given alone for."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return tuple[kind, ...]


def _add(kind: Kind, found: dict[str, Any], names: dict[str, Any]) -> None:
    if kind.__name__ in found:
        return
    found[kind.__name__] = {}
    about = attributes_of(kind)
    hints = get_type_hints(kind, localns=names)
    properties = {}
    for field in dataclasses.fields(kind):
        if field.repr:
            schema = _of(hints[field.name], found, names)
            if text := about.get(field.name):
                schema = {**schema, "description": text}
            properties[field.name] = schema
    about_it = (inspect.getdoc(kind) or "").partition("\n")[0]
    if kind is options.AdvantageConfig:
        # Its parameters stand beside its name, as in a configuration.
        found[kind.__name__] = {
            "type": "object",
            "description": about_it,
            "required": ["estimator"],
            "properties": {"estimator": properties["estimator"]},
            "additionalProperties": {},
        }
        return
    found[kind.__name__] = {
        "type": "object",
        "description": about_it,
        "required": list(properties),
        "properties": properties,
    }


def _of(hint: Any, found: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field's type."""
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        _add(hint, found, names)
        return _reference(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(each, found, names) for each in arguments]}
    if origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array", "items": _of(arguments[0], found, names)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], found, names)}
    raise TypeError(f"no schema for {hint!r}")


def attributes_of(kind: Kind) -> dict[str, str]:
    """What a class's docstring says of each attribute."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if match := re.fullmatch(r"    (\w+): (.*)", line):
            found[match[1]] = [match[2]]
        elif found and line.startswith("        "):
            found[list(found)[-1]].append(line.strip())
        elif line.strip():
            break
    return {name: " ".join(lines) for name, lines in found.items()}
