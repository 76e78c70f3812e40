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
    *("__main__", "commands", "app", "web", "rpc", "access", "buffer", "archive", "store"),
    *("runtime", "settings", "advantages", "sampling"),
)
"""From the top down: a room imports from those after it. `__main__` and `app` are files."""
BUFFER_ROOMS = ("inspection", "intake", "leaving", "delivery", "compute", "state", "telemetry")
"""Inside of `buffer`, below its own files."""
CLIENT_ROOMS = (
    *(
        "dataset",
        "collate",
        "collation",
        "_data",
        "tables",
        "_tables",
        "client",
        "aio",
        "_sync",
        "_async",
        "_transport",
    ),
    *(
        "_messages",
        "status",
        "scanned",
        "values",
        "looking",
        "advice",
        "stats",
        "history",
        "packed",
        "_packed",
        "trxp",
        "experience",
    ),
    *(
        "_payloads",
        "_prompt",
        "_fields",
        "_dense",
        "_codec",
        "options",
        "consumer_options",
        "leaving_options",
    ),
    *(
        "pacing",
        "offpolicy",
        "kl",
        "eid",
        "_arguments",
        "errors",
        "outcomes",
        "_error_base",
        "_show",
    ),
)
"""From the top down, as above. All but those that begin with `_` are files that users import."""
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


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The project's modules that a file imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
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
                yield target


def arrows(package: str) -> set[tuple[str, str]]:
    known = modules(package)
    return {(name, target) for name, path in known.items() for target in imports(name, path, known)}


def circles(arrows: set[tuple[str, str]]) -> dict[str, set[str]]:
    """What is left when all are gone from where no arrow leads on, again and again."""
    edges: dict[str, set[str]] = {}
    for name, target in arrows:
        edges.setdefault(name, set()).add(target)
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in leaves:
            del edges[name]
    return edges


def place(name: str, room: tuple[str, ...] = ()) -> str:
    """What stands directly in a room on the way to a module; empty: the room's own file."""
    return (*name.split(".")[1 + len(room) :], "")[0]


def test_the_client_has_these_rooms_and_no_file_beside_them() -> None:
    assert {place(name) for name in modules("experience_buffer")} - {""} == set(CLIENT_ROOMS)


def test_the_server_has_these_rooms_and_no_file_beside_them() -> None:
    found = {place(name) for name in modules("experience_buffer_server")} - {""}
    assert found == set(SERVER_ROOMS)
    assert len(SERVER_ROOMS) <= 13


@pytest.mark.parametrize(
    ("package", "room", "rooms"),
    [
        ("experience_buffer", (), CLIENT_ROOMS),
        ("experience_buffer_server", (), SERVER_ROOMS),
        ("experience_buffer_server", ("buffer",), BUFFER_ROOMS),
    ],
    ids=["client", "server", "buffer"],
)
def test_no_arrow_runs_up(package: str, room: tuple[str, ...], rooms: tuple[str, ...]) -> None:
    prefix = ".".join((package, *room)) + "."
    up = []
    for name, target in arrows(package):
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
    between = set()
    for name, target in arrows(package):
        ours, theirs = name.split("."), target.split(".")
        depth = 0
        while ours[depth : depth + 1] == theirs[depth : depth + 1] and depth < len(ours):
            depth += 1
        if depth < len(ours) and depth < len(theirs):
            parent = ".".join(ours[:depth])
            between.add((f"{parent}.{ours[depth]}", f"{parent}.{theirs[depth]}"))
    assert not circles(between)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_meets_itself(package: str) -> None:
    """Nor files, in one room or in several."""
    assert not circles(arrows(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_long(package: str) -> None:
    lengths = {
        name: path.read_text(encoding="utf-8").count("\n")
        for name, path in modules(package).items()
    }
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_class_is_an_owner_of_another() -> None:
    """What rooms know of their buffer is its state and its events: no interface beside these."""
    found = []
    for name, path in modules("experience_buffer_server").items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == "Owner":
                found.append(f"{name}:{node.lineno} class Owner")
            elif isinstance(node, ast.Attribute) and node.attr == "_owner":
                found.append(f"{name}:{node.lineno} attribute _owner")
    assert not found, "\n".join(found)


def reaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where more than one dot follows a buffer: what is behind its door is its own business."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)):
            continue
        owner = node.value.value
        owner = owner.func if isinstance(owner, ast.Call) else owner
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name in ("buffer", "_buffer") and node.value.attr != "settings":
            yield node.lineno, ast.unparse(node)


def test_who_serves_calls_a_buffer_and_nothing_behind_it() -> None:
    """`buffer.settings.x` is a value; everything else is asked of the buffer itself."""
    found = [
        f"{name}:{line} {text}"
        for name, path in modules("experience_buffer_server").items()
        if place(name) == "rpc"
        for line, text in reaches(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
    assert [text for _, text in reaches(ast.parse("self._buffer.state.drop(1)"))]
    assert [text for _, text in reaches(ast.parse("backend.buffer('a').flow.ack(1)"))]
    assert not list(reaches(ast.parse("buffer.ack(1).state; buffer.settings.lease_seconds")))
