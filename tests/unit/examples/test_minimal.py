"""The smallest training run can be read at once; docs/tutorials/grpo.md, which shows it, is run."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "minimal"
MOST_LINES = 40


@pytest.mark.parametrize("name", ["worker.py", "trainer.py"])
def test_it_has_forty_lines_at_most(name: str) -> None:
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= MOST_LINES
