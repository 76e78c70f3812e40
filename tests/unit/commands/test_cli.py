"""`experience-buffer serve`: what it refuses before it starts."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from experience_buffer_server.commands.cli import app


def test_a_store_is_in_memory_or_in_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--memory", "--data", str(tmp_path / "kept")])
    assert result.exit_code == 2
    assert f"--memory stores nothing in --data {tmp_path / 'kept'}: give one" in result.stderr
    assert not (tmp_path / "kept").exists()
