"""docs/snapshots.md works as it is written: its configuration, its commands, its Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experience_buffer import BufferConfig, Client, ConsumerConfig
from experience_buffer_server.commands.cli import application
from experience_buffer_server.settings.server import load_settings
from tests.integration.pages import DOCS
from tests.integration.plain import experience
from tests.integration.server import MakeServer

_BLOCKS = re.findall(
    r"^```(\w*)\n(.+?)^```", (DOCS / "snapshots.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)


def _blocks(kind: str) -> list[str]:
    return [text for name, text in _BLOCKS if name == kind]


def _run(command: str, places: dict[str, str]) -> str:
    """Run a documented command with our places for those that it names."""
    for shown, ours in places.items():
        command = command.replace(shown, ours)
    result = CliRunner().invoke(application(), shlex.split(command)[1:])
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.stdout


def test_snapshots_are_taken_and_restored_as_the_page_says(
    make_server: MakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup, new = tmp_path / "backup", tmp_path / "new"
    settings, buffers = _blocks("toml")
    server = make_server(toml=settings.replace("/backup/experience-buffer", str(backup)))
    ask, train = _blocks("python")
    take, restore, _ = _blocks("sh")
    with Client(server.address) as client:
        consumer = ConsumerConfig("trainer")
        client.update_buffer("default", group_by="none")
        client.create_buffer(BufferConfig("math", group_by="none", consumers=(consumer,)))
        client.push([experience(1, 0)], buffer="default")
        exec(ask, {"client": client})
        name, num_experiences, *_ = capsys.readouterr().out.split()
        assert num_experiences == "1"
        saved: dict[int, object] = {}
        names = {
            "client": client,
            "step": 7,
            "batch": client.sample(1),
            "save_checkpoint": lambda step, *, buffer: saved.update({step: buffer}),
        }
        exec(train, names)
        assert saved == {7: client.state_dict(7)}
        places = {
            "127.0.0.1:50051": server.address,
            "/var/lib/experience-buffer": str(server.data),
            "/backup/experience-buffer": str(backup),
            "snapshot-20260102T030405Z-1": name,
            "/var/lib/new": str(new),
        }
        for command in take.strip().splitlines():
            shown = _run(command, places)
    assert name in re.sub(r"\s", "", shown)
    # What is shown to start servers is `tests/unit/test_docs.py`'s to check.
    restore_it, _ = restore.strip().splitlines()
    assert "1 experiences" in _run(restore_it, places)
    changed = load_settings(_file(tmp_path, buffers)).buffers["math"]
    assert [consumer.unit for consumer in changed.consumers] == ["group"]


def _file(folder: Path, text: str) -> Path:
    path = folder / "new.toml"
    path.write_text(text, encoding="utf-8")
    return path
