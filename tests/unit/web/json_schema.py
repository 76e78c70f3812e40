"""As much of JSON Schema as the server's document uses: what a value breaks, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KINDS: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
KNOWN = {
    *("$ref", "type", "enum", "anyOf", "items", "properties", "required", "additionalProperties"),
    *("description", "title", "default", "minimum", "maximum", "pattern"),
}


def breaches(
    value: Any, schema: dict[str, Any], document: dict[str, Any], at: str
) -> Iterator[str]:
    """What of a value isn't as the schema says; fields that it doesn't know are breaches, too."""
    unknown = schema.keys() - KNOWN
    assert not unknown, f"this validator doesn't know {unknown}"
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [list(breaches(value, each, document, at)) for each in schema["anyOf"]]
        if all(found):
            yield from min(found, key=len)
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    kind = schema.get("type")
    if kind == "integer" and (not isinstance(value, int) or isinstance(value, bool)):
        yield f"{at}: {value!r} is no integer"
    elif kind == "number" and (not isinstance(value, int | float) or isinstance(value, bool)):
        yield f"{at}: {value!r} is no number"
    elif kind in _KINDS and not isinstance(value, _KINDS[kind]):
        yield f"{at}: {value!r} is no {kind}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} doesn't match"
    if isinstance(value, list) and "items" in schema:
        for place, each in enumerate(value):
            yield from breaches(each, schema["items"], document, f"{at}[{place}]")
    if isinstance(value, dict) and "properties" in schema:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{at}: {name} is missing"
        for name, each in value.items():
            if name not in schema["properties"]:
                if "additionalProperties" not in schema:
                    yield f"{at}: {name} isn't described"
                continue
            yield from breaches(each, schema["properties"][name], document, f"{at}.{name}")
