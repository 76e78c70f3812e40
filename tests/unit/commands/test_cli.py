"""`experience-buffer serve`: what it refuses before it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from experience_buffer_server.commands.cli import app


def test_a_store_is_in_memory_or_in_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--memory", "--data", str(tmp_path / "kept")])
    assert result.exit_code == 2
    assert f"--memory stores nothing in --data {tmp_path / 'kept'}: give one" in result.stderr
    assert not (tmp_path / "kept").exists()


def test_what_is_compiled_beforehand_is_not_compiled_by_servers() -> None:
    """Where it is compiled already, as here after the first run of the tests, that takes a second."""
    done = subprocess.run(
        [sys.executable, "-m", "experience_buffer_server", "compile"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "compiled\n"
    kept = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert kept.stdout == "[]\n"


LOADED = """
from numba.core import event

class Compiled(event.Listener):
    names = []
    def on_start(self, event): self.names.append(event.data["dispatcher"].__name__)
    def on_end(self, event): pass

with event.install_listener("numba:compile", Compiled()):
    from experience_buffer_server.advantages.kernels.devices import warm_up
    from experience_buffer_server.buffer.intake.compiled import scan
    warm_up("cpu", threads=1)
print(Compiled.names)
"""
