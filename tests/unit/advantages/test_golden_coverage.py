"""Every file of pinned results is read by some test."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_every_golden_file_is_named_by_a_test() -> None:
    files = sorted(path.stem for path in (TESTS / "data" / "goldens").glob("*.json"))
    assert len(files) == 24
    modules = [path.read_text() for path in TESTS.rglob("test_*.py")]
    unread = [name for name in files if not any(f'"{name}' in module for module in modules)]
    assert unread == []
