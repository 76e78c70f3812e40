"""The page on datasets: its examples run and print what it says; its tables name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from experience_buffer import AdvantageConfig, BufferConfig, Client, ConsumerConfig, collation
from tests.integration.plain import groups
from tests.integration.server import Server

PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")


def test_the_examples_print_what_they_say(shared_server: Server, tmp_path: Path) -> None:
    with Client(shared_server.address) as client:
        client.create_buffer(
            BufferConfig(
                "math",
                group_size=4,
                consumers=(ConsumerConfig("trainer", "group"),),
                advantage=AdvantageConfig("grpo"),
            )
        )
        client.push(groups(24, 4), buffer="math")
    blocks = re.findall(r"^```python\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    # As the page asks of scripts that start workers.
    code = 'if __name__ == "__main__":\n' + textwrap.indent("".join(blocks), "    ")
    script = tmp_path / "shown.py"
    script.write_text(code.replace("127.0.0.1:50051", shared_server.address), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^ *print\(.+\)  # (.+)$", code, re.MULTILINE)
    assert done.stdout.splitlines() == shown
    assert len(shown) == 6


def test_every_collation_function_is_in_the_table() -> None:
    listed = re.findall(r"^\| `(\w+_collate)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == [name for name in collation.__all__ if name.endswith("_collate")]
