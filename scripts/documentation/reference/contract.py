"""The page of the contract, from the comments of the .proto files.

Their style is checked by `buf lint`: a comment stands above what it explains, a field is one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).resolve().parents[3] / "proto" / "experience_buffer" / "v1"
_INTRODUCTION: Final = """# The contract

Package `experience_buffer.v1`: what clients of any language speak. Fields are added, never
renumbered. Generic gRPC tools list and call it, where `server.reflection` is on.
"""
_RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
_FIELD = re.compile(r"((?:repeated |optional )?(?:map<[^>]+>|[\w.]+)) (\w+) = (\d+)")
_NUMBER = re.compile(r"(\w+) = (\d+)")


@dataclass(slots=True)
class Part:
    """A service, a message or an enum, with what is in it."""

    kind: str
    name: str
    """With those that it lies in, such as `Filter.Range`."""
    text: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    """What is in it: its name, its type, and what it means."""


def page() -> str:
    """The page: the calls, then their messages by file."""
    found = [part for path in _files() for part in parts(path)]
    names = {part.name for part in found}
    text = [_INTRODUCTION]
    for part in sorted(found, key=lambda part: part.kind != "service"):
        text.append(f"\n## `{part.name}`\n\n{part.text}\n")
        if part.rows:
            first = (
                "Call" if part.kind == "service" else "Value" if part.kind == "enum" else "Field"
            )
            types = part.kind != "enum"
            text.append(
                f"\n| {first} |{' Type |' if types else ''} Meaning |\n|---|---|{'---|' * types}\n"
            )
        for name, kind, meaning in part.rows:
            cell = f" {_linked(kind, names)} |" if part.kind != "enum" else ""
            text.append(f"| `{name}` |{cell} {meaning} |\n")
    return "".join(text)


def _files() -> list[Path]:
    """The service's file first."""
    return sorted(_FOLDER.glob("*.proto"), key=lambda path: (path.stem != "service", path.stem))


def parts(path: Path) -> Iterator[Part]:
    """The parts of a file, from top to bottom; of those within another, the outer one first."""
    comment: list[str] = []
    open_parts: list[Part] = []
    statement = ""
    depth = 0
    for line in path.read_text("utf-8").splitlines():
        code, _, remark = line.partition("//")
        if not code.strip():
            comment = [*comment, remark.strip()] if remark and not statement else []
            continue
        statement = f"{statement} {code.strip()}".strip()
        if not statement.endswith((";", "{", "}")):
            continue
        text = " ".join([*comment, remark.strip()] if remark else comment).replace("|", "\\|")
        begun = re.match(r"(service|message|enum) (\w+) \{", statement)
        if begun:
            outer = f"{open_parts[-1].name}." if open_parts else ""
            part = Part(begun[1], outer + begun[2], text)
            open_parts.append(part)
            if not statement.endswith("}"):
                depth += 1
            yield part
            if statement.endswith("}"):
                open_parts.pop()
        elif statement == "}":
            # The end of a `oneof` ends no part.
            depth -= 1
            if depth < len(open_parts):
                open_parts.pop()
        elif statement.endswith("{"):
            depth += 1
        elif open_parts:
            row = _row(open_parts[-1].kind, statement, text)
            if row:
                open_parts[-1].rows.append(row)
        comment, statement = [], ""


def _row(kind: str, statement: str, text: str) -> tuple[str, str, str] | None:
    if kind == "service" and (call := _RPC.match(statement)):
        name, asks, request, answers, response = call.groups()
        return name, f"{asks or ''}{request} → {answers or ''}{response}", text
    if kind == "enum" and (value := _NUMBER.match(statement)):
        return value[1], "", text
    if kind == "message" and (found := _FIELD.match(statement)):
        return found[2], found[1], text
    return None  # `reserved` and `option`.


def _linked(kind: str, names: set[str]) -> str:
    """A type, with links to those that are on the page."""

    def link(match: re.Match[str]) -> str:
        name = match[0]
        return f"[{name}](#{name.lower().replace('.', '')})" if name in names else name

    return re.sub(r"[A-Za-z][\w.]*", link, kind.replace("<", "&lt;").replace(">", "&gt;"))
