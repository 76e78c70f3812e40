"""What the README tells a new user to run does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.server import Server

_ROOT = Path(__file__).parents[2]


def test_quickstart(make_server: Callable[..., Server]) -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    server = make_server()
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:50051", server.address)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    stored, *experiences = done.stdout.splitlines()
    assert stored == "4 stored"
    assert len(experiences) == 4
    for run, line in enumerate(experiences):
        uid, reward, advantages = line.split(maxsplit=2)
        assert uid.startswith(f"0/7/{run}/0/")
        assert float(reward) == run % 2
        # Rewards 0, 1, 0, 1: mean 1/2, standard deviation 1/sqrt(3).
        expected = (run % 2 - 0.5) * 3**0.5
        values = [float(value) for value in advantages.strip("[]").split(",")]
        assert values == pytest.approx([expected, expected], rel=1e-4)
