"""The page of all settings, from the typed settings."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from experience_buffer_server.settings.server import ENV_PREFIX, Settings

_INTRODUCTION: Final = """# Settings

Every key with its type, bounds and default. [Configuration](../configuration.md) explains them at more
length, with examples. A key of a section of its own may come from the environment as well:
`[server] port` is `{prefix}SERVER__PORT`.
"""
_KINDS: Final = {
    **{"int": "whole number", "float": "number", "str": "text", "bool": "true, false"},
    **{"Path": "path", "dict": "table", "tuple": "array", "list": "array"},
}
_BOUNDS: Final = (
    *((Ge, "ge", "at least"), (Gt, "gt", "above")),
    *((Le, "le", "at most"), (Lt, "lt", "below")),
)
_MACHINE: Final = (2**31, 2**32, 2**63, 2**64)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    section: str
    """As in TOML, such as `server` or `buffers.NAME.retention`."""
    name: str
    values: str
    """What it takes, in words."""
    default: str
    """As TOML writes it; empty: none."""
    meaning: str


def page() -> str:
    """The page, a table for each section."""
    parts = [_INTRODUCTION.format(prefix=ENV_PREFIX)]
    section = None
    for key in keys():
        if key.section != section:
            section = key.section
            brackets = f"[[{section}]]" if section.endswith("consumers") else f"[{section}]"
            parts.append(
                f"\n## `{brackets}`\n\n| Key | Takes | Default | Meaning |\n|---|---|---|---|\n"
            )
        cells = (f"`{key.name}`", key.values, key.default and f"`{key.default}`", key.meaning)
        parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


def keys() -> Iterator[Key]:
    """All settings, each section's before those of the tables within it."""
    pending: list[tuple[str, type[BaseModel]]] = [("", Settings)]
    seen: set[type[BaseModel]] = set()
    while pending:
        section, table = pending.pop(0)
        seen.add(table)
        meanings = documented(table)
        inner: list[tuple[str, type[BaseModel]]] = []
        for name, field in table.model_fields.items():
            path = f"{section}.{name}" if section else name
            tables = [each for each in tables_of(field.annotation) if each not in seen]
            if tables:
                key_of = ".NAME" if "dict[" in str(field.annotation) else ""
                inner += [(path + key_of, each) for each in tables]
            if section:
                meaning = meanings.get(name) or (_sentence(tables[0].__doc__) if tables else "")
                yield Key(section, name, _values(field), _default(field), _plain(meaning))
        pending = inner + pending


def documented(table: type[BaseModel]) -> dict[str, str]:
    """What stands below the fields of a table, by their names; of those that it inherits, too."""
    found: dict[str, str] = {}
    for each in reversed(table.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):  # One of pydantic's own.
            continue
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    found[name] = meaning
    return found


def tables_of(annotation: object) -> list[type[BaseModel]]:
    """The tables that a type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for part in get_args(annotation) for table in tables_of(part)]


def _values(field: FieldInfo) -> str:
    """What a field takes, in words."""
    bounds = [
        f"{word} {getattr(bound, name)}"
        for bound in field.metadata
        for kind, name, word in _BOUNDS
        # What only keeps a number within a machine's integers is nobody's concern.
        if isinstance(bound, kind) and getattr(bound, name) not in _MACHINE
    ]
    return ", ".join(part for part in (_kind(field.annotation), *bounds) if part)


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(part)}`" for part in parts)
    if tables_of(annotation) and origin is None:
        return "table"
    if origin is not None and getattr(origin, "__name__", "") in _KINDS:
        return _KINDS[origin.__name__]
    if parts:  # One of several, such as a path or none; or one that is annotated.
        kinds = dict.fromkeys(_kind(part) for part in parts if part is not type(None))
        return " or ".join(kind for kind in kinds if kind)
    name = getattr(annotation, "__name__", "")
    return _KINDS.get(name, "")


def _default(field: FieldInfo) -> str:
    """A default as TOML writes it."""
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    match value:
        case None | BaseModel():
            return ""
        case tuple() if any(isinstance(each, BaseModel) for each in value):
            return ""
        case Path():
            return json.dumps(str(value))
        case _:
            return json.dumps(value)


def _sentence(text: str | None) -> str:
    return (text or "").strip().split("\n\n")[0]


def _plain(text: str) -> str:
    """A docstring on one line, for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
