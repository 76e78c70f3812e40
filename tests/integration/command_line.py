"""Running the command line against a server of the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from experience_buffer import EID, Experience
from experience_buffer_server.commands.cli import application


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def values(self) -> list[Any]:
        """What `--json` printed: a value a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def value(self) -> Any:
        """The only one."""
        (one,) = self.values
        return one

    @property
    def error(self) -> Any:
        """What `--json` said of an error."""
        return json.loads(self.err)["error"]

    @property
    def words(self) -> str:
        """What was printed, with single spaces."""
        return " ".join(self.out.split())


class CommandLine:
    """Runs commands against one server."""

    def __init__(self, address: str, *options: str) -> None:
        self.options = ("--address", address, *options)

    def __call__(
        self, *arguments: str, typed: str | None = None, environment: dict[str, str] | None = None
    ) -> Ran:
        """Run a command; the options of the connection follow its own."""
        command = [*map(str, arguments), *self.options]
        done = CliRunner().invoke(application(arguments[0]), command, input=typed, env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ran(done.exit_code, done.stdout, done.stderr)


def rollouts(
    task: int = 7, rewards: tuple[float, ...] = (0.0, 1.0), *, first_run: int = 0, **fields: Any
) -> list[Experience]:
    """Answers to one prompt, a run each."""
    return [
        Experience(
            eid=EID(batch=0, task=task, run=first_run + number),
            prompt=[5, 6, 7],
            response=[8, 9, 10, 11],
            logprobs=[-0.5, -0.25, -0.125, -1.0],
            reward=reward,
            **({"prompt_text": "2 + 2?", "response_text": "It is 4."} | fields),
        )
        for number, reward in enumerate(rewards)
    ]
