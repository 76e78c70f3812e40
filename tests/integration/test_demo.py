"""The demo's loop, cut short: server and trainer are killed, and nothing is lost or repeated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_a_short_run_survives_the_kill_of_its_server_and_of_its_trainer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--updates", "24", "--kill"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "serving again" in done.stdout, done.stdout + done.stderr
    # The kill comes at update 17 or, where this process is slow, later.
    assert re.search(r"resumed from its checkpoint of update [12]0,", done.stdout)
    assert re.search(r"= 6,144 trained \+ [\d,]+ in the buffer", done.stdout), done.stdout
    assert "0 missing, 0 trained twice" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    # So few updates can't reach the target, and the exit status says so.
    assert done.returncode == 1
