"""The demo's loop, cut short: the server is killed midway, and nothing acknowledged is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_a_short_run_survives_the_kill_of_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--updates", "24", "--kill"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "serving again" in done.stdout, done.stdout + done.stderr
    assert "0 missing, 0 trained twice" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    # So few updates can't reach the target, and the exit status says so.
    assert done.returncode == 1
