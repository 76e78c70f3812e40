"""The command line itself: what it says of itself, and what it refuses before it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from experience_buffer_server.commands import connection
from experience_buffer_server.commands.cli import PANELS, application, names
from experience_buffer_server.settings.server import ConfigurationError, load_settings

ROOT = Path(__file__).parents[3]


def test_a_store_is_in_memory_or_in_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        application(), ["serve", "--memory", "--data", str(tmp_path / "kept")]
    )
    assert result.exit_code == 2
    assert f"--memory stores nothing in --data {tmp_path / 'kept'}: give one" in result.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_the_version_is_printed(arguments: list[str]) -> None:
    result = CliRunner().invoke(application(), arguments)
    assert (result.exit_code, result.stdout) == (0, f"{version('experience-buffer')}\n")


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command with those below it, by how it is called."""
    yield names, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *names, name)


ALL = dict(commands(typer.main.get_command(application())))


@pytest.mark.parametrize("called", ALL, ids=" ".join)
def test_help_shows_every_word_that_was_written(
    called: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square brackets, for one, are taken for colours and swallowed."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    result = CliRunner().invoke(application(), [*called, "--help"])
    assert result.exit_code == 0
    shown = " ".join(result.stdout.replace("│", " ").split())
    command = ALL[called]
    assert command.help
    assert " ".join(command.help.split()) in shown
    for parameter in command.params:
        told = getattr(parameter, "help", None)
        assert told, f"{parameter.name} isn't explained"
        assert " ".join(told.split()) in shown
        default = getattr(parameter, "show_default", None)
        assert not isinstance(default, str) or f"[default: ({default})]" in shown


def lacking(*modules: str) -> str:
    """Code that runs the command as where these modules aren't installed."""
    return f"""
import sys
missing = {modules!r}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from experience_buffer_server.__main__ import main
main()
"""


SERVER_ONLY = (
    *("grpc_health", "grpc_reflection", "lmdb", "msgpack", "numba", "numpy", "prometheus_client"),
    *("pydantic_settings", "rich", "typer", "uvloop", "xxhash"),
)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("serve", SERVER_ONLY),
        ("health", SERVER_ONLY),
        ("serve", ("lmdb", "msgpack")),
        ("serve", ("uvloop",)),
        ("health", ("grpc_health",)),
    ],
)
def test_where_only_the_client_is_installed_it_says_what_to_install(
    tmp_path: Path, command: str, missing: tuple[str, ...]
) -> None:
    """Also where others have brought some of what the server needs, as many bring typer."""
    done = subprocess.run(
        [sys.executable, "-c", lacking(*missing), command],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
        env=os.environ | {"EXPERIENCE_BUFFER_SERVER__PORT": "0"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("experience-buffer: the server isn't installed here, only the cl")
    assert done.stderr.endswith(" is missing; pip install 'experience-buffer[server]'\n")
    assert not done.stdout


def test_a_client_alone_has_a_version() -> None:
    done = subprocess.run(
        [sys.executable, "-c", lacking(*SERVER_ONLY), "--version"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{version('experience-buffer')}\n")


def test_the_installed_command_is_the_one_that_can_say_so() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'experience-buffer = "experience_buffer_server.__main__:main"' in text


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


IMPORTED = """
import contextlib, io, sys
from experience_buffer_server.commands.cli import main, names

for name in names():
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert "Usage:" in shown.getvalue(), name
heavy = ("grpc", "numpy", "pydantic_settings", "lmdb", "numba", "torch", "pyarrow", "fastapi")
print(sorted(set(heavy) & set(sys.modules)))
"""


def test_what_a_command_needs_is_imported_where_it_needs_it() -> None:
    """So that its first line comes in a fraction of a second; asking for help needs none of it."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_each_command_is_in_the_help_below_the_heading_of_its_kind() -> None:
    shown = CliRunner().invoke(application(), ["--help"]).stdout
    for panel, inside in PANELS.items():
        assert f" {panel} " in shown
        below = shown[shown.index(f" {panel} ") :]
        assert all(f" {name} " in below for name in inside)


def test_variables_that_tell_commands_of_a_server_are_known_to_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be set where it is started, and any other that it doesn't know is refused."""
    for option in connection.OPTIONS:
        monkeypatch.setenv(connection.variable(option), "x")
    assert load_settings(None) == load_settings(None)
    monkeypatch.setenv("EXPERIENCE_BUFFER_ADRESS", "x")
    with pytest.raises(ConfigurationError, match="EXPERIENCE_BUFFER_ADRESS: unknown"):
        load_settings(None)


def test_the_page_on_the_command_line_has_every_command() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    unnamed = [name for name in names() if not re.search(rf"[`| ]{name}\b", page)]
    assert not unnamed


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("experience-buffer gro", ["groups"]),
        ("experience-buffer show --color", ["--color-by"]),
        ("experience-buffer show --color-by lo", ["logprob"]),
        ("experience-buffer token re", ["revoke"]),
    ],
)
def test_a_shell_completes_commands_options_and_words(typed: str, offered: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experience_buffer_server"],
        capture_output=True, text=True, check=True,
        env=os.environ
        | {
            "_EXPERIENCE_BUFFER_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
        },
    )  # fmt: skip
    assert done.stdout.split() == offered
