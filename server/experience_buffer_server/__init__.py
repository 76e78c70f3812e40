"""The experience buffer server."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Look `__version__` up when it is asked for: the writer process doesn't, and starts sooner."""
    if name == "__version__":
        from importlib.metadata import version

        return version("experience-buffer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
