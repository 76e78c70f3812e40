"""The page of the HTTP routes, from the OpenAPI document that a server gives out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from scripts.documentation.reference.running import said

_INTRODUCTION: Final = """# HTTP routes

On `server.metrics_port`; `/openapi.json` of a server says the same to programs.

{about}
"""
_VALUES: Final = """
# Values

JSON of the client's values, by the same names: what their `to_dict()` gives.
"""
_Schema = Mapping[str, Any]


def page() -> str:
    """The page: the routes, then the values that they answer with."""
    document = said().openapi
    about = " ".join(document["info"]["description"].split())
    parts = [_INTRODUCTION.format(about=about)]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _route(path, method, operation)
    parts.append(_VALUES)
    for name, schema in document["components"]["schemas"].items():
        parts += _value(name, schema)
    return "".join(parts)


def _route(path: str, method: str, operation: _Schema) -> Iterator[str]:
    yield f"\n## `{method.upper()} {path}`\n\n"
    yield f"{(operation.get('description') or operation['summary']).strip()}\n\n"
    answer = operation["responses"].get("200", {}).get("content", {})
    for kind, content in answer.items():
        schema = _type(content.get("schema", {}))
        if kind != "application/json":
            yield f"Answers with `{kind}`.\n"
        elif schema:
            yield f"Answers with {schema}.\n"
    rows = [
        f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {_default(each['schema'])} | "
        f"{_cell(each.get('description', ''))} |\n"
        for each in operation.get("parameters", [])
    ]
    if rows:
        yield "\n| Parameter | In | Takes | Default | Meaning |\n|---|---|---|---|---|\n"
        yield from rows


def _value(name: str, schema: _Schema) -> Iterator[str]:
    yield f"\n## `{name}`\n\n{schema.get('description', '').strip()}\n"
    rows = [
        f"| `{key}` | {_type(each)} | {_cell(each.get('description', ''))} |\n"
        for key, each in schema.get("properties", {}).items()
    ]
    if rows:
        yield "\n| Field | Type | Meaning |\n|---|---|---|\n"
        yield from rows


def _type(schema: _Schema) -> str:
    """What a value may be, in words, with links to those that are on the page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, map(_type, schema["anyOf"]))))
    kind = schema.get("type", "")
    match kind:
        case "array":
            return f"array of {_type(schema.get('items', {})) or 'anything'}"
        case "object" if "properties" in schema:
            fields = (f"`{key}`: {_type(each)}" for key, each in schema["properties"].items())
            return f"an object of {', '.join(fields)}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"object of {_type(schema['additionalProperties']) or 'anything'}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"))
        if key in schema
    ]
    names = kind if isinstance(kind, str) else " or ".join(kind)
    return ", ".join(each for each in (names, *bounds) if each)


def _default(schema: _Schema) -> str:
    default = schema.get("default")
    return "" if default in (None, "", []) else f"`{json.dumps(default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
