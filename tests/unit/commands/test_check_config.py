"""Settings are checked without a server, and all that is wrong is said at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experience_buffer_server.commands.cli import application
from experience_buffer_server.settings.server import Settings


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(application(), ["check-config", str(path), *options])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def test_what_can_be_used_is_said_and_shown_with_its_defaults(file: Path) -> None:
    file.write_text('[server]\nport = 50_052\n[buffers.math]\nadvantage = "grpo"\n', "utf-8")
    done = check(file)
    assert (done.exit_code, done.stdout) == (0, f"{file}: can be used; buffers: math\n")
    settings = json.loads(check(file, "--json").stdout)
    assert settings["server"]["port"] == 50_052
    assert settings["store"]["path"] == "data"
    assert settings["buffers"]["math"]["advantage"]["estimator"] == "grpo"
    assert settings.keys() == Settings.model_fields.keys()


def test_everything_that_is_wrong_is_said_at_once_by_key_with_what_would_do(file: Path) -> None:
    file.write_text(
        "[server]\nprot = 1\nport = 99999\n[buffers.math]\ngroup_size = -1\n[nonsense]\n", "utf-8"
    )
    done = check(file)
    assert (done.exit_code, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert "server.prot: unknown key; did you mean port?" in lines
    assert any(line.startswith("server.port: ") and "65535" in line for line in lines)
    assert any(line.startswith("buffers.math.group_size: ") for line in lines)
    assert any(line.startswith("nonsense: unknown key") for line in lines)
    plain = check(file, "--json")
    assert (plain.exit_code, plain.stdout) == (1, "")
    errors = [json.loads(line)["error"] for line in plain.stderr.splitlines()]
    assert [f"{each['key']}: {each['message']}" for each in errors] == lines
    assert {each["type"] for each in errors} == {"ConfigurationError"}


def test_what_only_a_start_would_find_is_found(file: Path, tmp_path: Path) -> None:
    file.write_text(
        f'[server]\nhost = "0.0.0.0"\n[access]\nfile = "{tmp_path}/none.toml"\n', encoding="utf-8"
    )
    done = check(file)
    assert done.exit_code == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("server.host: '0.0.0.0' is reachable from other machines in plain text")
    assert "none.toml" in second
    assert list(tmp_path.iterdir()) == [file], "and nothing is started or made for it"


@pytest.mark.parametrize("text", ["a = = 1", "\x1b[2J = 1"])
def test_a_file_that_is_no_toml_says_where(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    done = check(file)
    assert done.exit_code == 1
    assert "line 1" in done.stderr
    assert "\x1b" not in done.stderr


def test_no_file_is_wrong_use(file: Path) -> None:
    assert check(file).exit_code == 2


def test_the_environment_counts_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("EXPERIENCE_BUFFER_SERVER__PORT", "x")
    done = check(file)
    assert done.exit_code == 1
    assert done.stderr.startswith("server.port: ")
