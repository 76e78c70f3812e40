"""The client's pages: directions to mkdocstrings, which reads the docstrings of everything public."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import experience_buffer

_PACKAGE: Final = "experience_buffer"
CLIENTS: Final = ("client", "aio")
"""Modules of the page about clients."""
EXPERIENCES: Final = ("experience", "eid", "options", "consumer_options", "pacing")
TENSORS: Final = ("dataset", "collation", "packed", "trxp", "kl", "offpolicy")
_MOVED: Final = ("collate",)
"""Modules whose names are elsewhere now."""


def modules() -> list[str]:
    """The client's public modules, by name."""
    folder = Path(experience_buffer.__file__).parent
    names = (path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return sorted(name for name in names if name not in _MOVED)


def clients() -> str:
    """The page of the clients, and of what their calls return."""
    parts = [
        "# Clients\n\n`from experience_buffer import ...` brings every name of these pages but those of the "
        "modules for tensors; [The client](../client.md) goes through their use once.\n\n"
    ]
    parts += [_thing(f"{module}.{name}") for module in CLIENTS for name in _public(module)]
    parts.append(
        "## What calls return\n\nThose of an `AsyncClient` return the same with `Async` before the name.\n\n"
    )
    return "".join([*parts, *map(_thing, reached())])


def reached() -> list[str]:
    """What a client's calls return and no public module has; an `AsyncClient` has the same, to await."""
    things = [getattr(experience_buffer, name) for name in experience_buffer.__all__]
    paths = (f"{each.__module__}.{each.__qualname__}" for each in things if isinstance(each, type))
    inside = f"{_PACKAGE}._sync."
    return sorted(path.removeprefix(f"{_PACKAGE}.") for path in paths if path.startswith(inside))


def experiences() -> str:
    """The page of what users make: experiences, configurations, options."""
    return _page("Experiences and options", "What is given to a client.", EXPERIENCES)


def tensors() -> str:
    """The page of what trainers make of batches."""
    return _page("Datasets and tensors", "What trainers make of batches.", TENSORS)


def values() -> str:
    """The page of all other modules: what calls return, and raise."""
    elsewhere = {*CLIENTS, *EXPERIENCES, *TENSORS}
    others = [name for name in modules() if name not in elsewhere]
    return _page("Answers and errors", "What calls return, and what they raise.", others)


def _page(title: str, text: str, names: Sequence[str]) -> str:
    parts = [f"# {title}\n\n{text}\n\n"]
    for module in names:
        about = (importlib.import_module(f"{_PACKAGE}.{module}").__doc__ or "").strip()
        parts.append(f"## `{_PACKAGE}.{module}`\n\n{about}\n\n")
        parts += [_thing(f"{module}.{name}") for name in _public(module)]
    return "".join(parts)


def _public(module: str) -> list[str]:
    """What a module has for all to see; not what it only passes on from another one of them."""
    loaded = importlib.import_module(f"{_PACKAGE}.{module}")
    others = {f"{_PACKAGE}.{name}" for name in modules()} - {loaded.__name__}
    return [
        name
        for name in loaded.__all__
        if getattr(getattr(loaded, name), "__module__", "") not in others
    ]


def _thing(path: str) -> str:
    return f"::: {_PACKAGE}.{path}\n\n"
