"""The page of the command line, from what declares it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import typer

from experience_buffer_server.commands import cli

_PROGRAM: Final = "experience-buffer"
_INTRODUCTION: Final = f"""# Commands

`{_PROGRAM}` is installed with the server: `.venv/bin/{_PROGRAM}` in a checkout. `--help` shows what
stands here.
"""


def page() -> str:
    """The page: a heading for each command, with its arguments and options."""
    parts = [_INTRODUCTION]
    for name, command in commands():
        usage = " ".join(
            (_PROGRAM, name, *(_metavar(one) for one in command.params if _is_argument(one)))
        )
        has_options = any(not _is_argument(one) for one in command.params)
        parts.append(f"\n## `{name}`\n\n{inspect.cleandoc(command.help or '')}\n\n")
        parts.append(f"```text\n{usage}{' [OPTIONS]' if has_options else ''}\n```\n")
        rows = [_row(one) for one in command.params if not one.hidden and one.name != "help"]
        if rows:
            parts.append("\n| Takes | Default | Meaning |\n|---|---|---|\n" + "".join(rows))
    return "".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups as `group command`."""
    pending = [("", typer.main.get_command(cli.application()))]
    while pending:
        name, found = pending.pop(0)
        inner = getattr(found, "commands", {})
        pending = [(f"{name} {key}".strip(), each) for key, each in inner.items()] + pending
        if not inner:
            yield name, found


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if _is_argument(parameter):
        takes = f"`{_metavar(parameter)}`"
    else:
        takes = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
    default, shown = parameter.default, parameter.show_default
    if isinstance(shown, str):
        default = shown
    text = (
        "" if default is None or callable(default) or default in ((), "", False) else f"`{default}`"
    )
    help_text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| {takes} | {text} | {help_text} |\n"
