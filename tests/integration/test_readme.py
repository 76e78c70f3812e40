"""What the README tells a new user to run does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.integration.server import MakeServer

_ROOT = Path(__file__).parents[2]


def quickstart() -> str:
    """The code that a new user saves and runs."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    code: str = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    return code


def test_quickstart(make_server: MakeServer) -> None:
    code = quickstart()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    code = code.replace("127.0.0.1:50051", make_server().address)
    for _ in range(2):  # A user may run it again.
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        stored, advantages = done.stdout.splitlines()
        assert stored == "4 stored"
        # Rewards 0, 1, 0, 1: mean 1/2, standard deviation 1/sqrt(3).
        expected = [[sign * 3**0.5 / 2] * 2 for sign in (-1, 1, -1, 1)]
        assert np.allclose(json.loads(advantages), expected, rtol=1e-4)
