"""The house: which rooms there are, that arrows between them run down, and that none meets itself.

A room is a folder. An arrow is an import of one room's module by another's, wherever it stands in
the file: one that only a type checker follows counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "experience_buffer_server": ROOT / "server" / "experience_buffer_server",
    "experience_buffer": ROOT / "client" / "experience_buffer",
}
SERVER_ROOMS = (
    *("__main__", "commands", "app", "rpc", "access", "buffer", "store"),
    *("runtime", "settings", "advantages", "sampling"),
)
"""From the top down: a room imports from those after it. `__main__` and `app` are files."""
BUFFER_ROOMS = ("intake", "leaving", "delivery", "compute", "state")
"""Inside of `buffer`, below its own files."""
MOST_LINES = 400
GENERATED = "v1"


def modules(package: str) -> dict[str, Path]:
    """Dotted name, as others import it, to file."""
    base = PACKAGES[package]
    found = {}
    for path in base.rglob("*.py"):
        parts = path.relative_to(base).with_suffix("").parts
        if parts[0] == GENERATED:
            continue
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join((package, *parts))] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """The project's modules that a file imports, and whether it does so when it is loaded."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_load = {node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, *base.split("."))) if base else ".".join(above)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in names:
            target = target if target in known else target.rpartition(".")[0]
            if target in known and target != name:
                yield target, node in at_load


def arrows(package: str, *, only_at_load: bool = False) -> set[tuple[str, str]]:
    known = modules(package)
    return {
        (name, target)
        for name, path in known.items()
        for target, at_load in imports(name, path, known)
        if at_load or not only_at_load
    }


def place(name: str, room: tuple[str, ...] = ()) -> str:
    """What stands directly in a room on the way to a module; empty: the room's own file."""
    return (*name.split(".")[1 + len(room) :], "")[0]


def test_the_server_has_these_rooms_and_no_file_beside_them() -> None:
    found = {place(name) for name in modules("experience_buffer_server")} - {""}
    assert found == set(SERVER_ROOMS)
    assert len(SERVER_ROOMS) <= 12


@pytest.mark.parametrize(
    ("room", "rooms"), [((), SERVER_ROOMS), (("buffer",), BUFFER_ROOMS)], ids=["server", "buffer"]
)
def test_no_arrow_runs_up(room: tuple[str, ...], rooms: tuple[str, ...]) -> None:
    prefix = ".".join(("experience_buffer_server", *room)) + "."
    up = []
    for name, target in arrows("experience_buffer_server"):
        if name.startswith(prefix) and target.startswith(prefix):
            upper, lower = place(name, room), place(target, room)
            # A room's own files stand above the rooms inside of it.
            rank = {place: number for number, place in enumerate(rooms)}
            if upper != lower and rank.get(upper, -1) > rank.get(lower, -1):
                up.append(f"{name} imports {target}")
    assert not up, "\n".join(sorted(up))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_meets_itself(package: str) -> None:
    """Folders, on every floor: of two that stand beside each other only one knows the other."""
    edges: dict[str, set[str]] = {}
    for name, target in arrows(package, only_at_load=package == "experience_buffer"):
        ours, theirs = name.split("."), target.split(".")
        depth = 0
        while ours[depth : depth + 1] == theirs[depth : depth + 1] and depth < len(ours):
            depth += 1
        if depth < len(ours) and depth < len(theirs):
            parent = ".".join(ours[:depth])
            edges.setdefault(f"{parent}.{ours[depth]}", set()).add(f"{parent}.{theirs[depth]}")
    while leaves := [room for room, targets in edges.items() if not targets & edges.keys()]:
        for room in leaves:
            del edges[room]
    assert not edges, f"rooms that meet themselves: {edges}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_long(package: str) -> None:
    lengths = {
        name: path.read_text(encoding="utf-8").count("\n")
        for name, path in modules(package).items()
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
