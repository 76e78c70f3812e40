"""What commands that look at a server, or act on it, have in common.

`@looks` gives a command the options of the connection, `--timeout` and `--json`, and ends it with a
status where it fails: 1 where the answer is no (there is no such experience, group, lease; it is not
in the state for that), 2 where it was used wrongly or the server can't be reached or refuses the caller.

With `--json` each value is printed as one line: what its class's `to_dict()` gives. An error is one
line on stderr then, too: {"error": {"type": ..., "message": ..., "status": ...}}.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec, TypeAlias

import typer

from experience_buffer_server.commands import connection

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from experience_buffer import Client

P = ParamSpec("P")

_PATIENT_SECONDS: Final = 60.0

BufferName: TypeAlias = Annotated[
    str,
    typer.Option("--buffer", "-b", help="The buffer; needn't be given where there is only one."),
]
Consumer: TypeAlias = Annotated[str, typer.Option("--consumer", "-c", help="The consumer.")]
Number: TypeAlias = Annotated[
    int, typer.Option("--number", "-n", min=1, help="How many are shown at most.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]


@dataclass
class Looking:
    """What a command looks through: a connection, made where it is first used, and a way to answer."""

    options: connection.Connection
    timeout: float
    as_json: bool
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)
    _client: Client | None = field(default=None, repr=False)
    _console: Console | None = field(default=None, repr=False)

    @property
    def client(self) -> Client:
        """The server's client; it is closed when the command ends."""
        if self._client is None:
            made = self.options.client(timeout=self.timeout, patient=False)
            self._client = self._stack.enter_context(made)
        return self._client

    def patient_client(self) -> Client:
        """Another one, for what takes long: it goes on where a connection broke."""
        made = self.options.client(timeout=max(self.timeout, _PATIENT_SECONDS), large=True)
        return self._stack.enter_context(made)

    def buffer(self, name: str) -> str:
        """The name of the buffer that is meant: the only one where none was given.

        Raises:
            typer.BadParameter: None was given, and there are none or several.
        """
        if name:
            return name
        names = [each.name for each in self.client.get_stats().buffers]
        if len(names) == 1:
            return names[0]
        if not names:
            raise typer.BadParameter("the server has no buffer yet", param_hint="--buffer")
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise typer.BadParameter(f"which one? There are {shown}", param_hint="--buffer")

    @property
    def console(self) -> Console:
        """Where answers go."""
        if self._console is None:
            from experience_buffer_server.commands import terminal

            self._console = terminal.console()
        return self._console

    def say(self, *lines: RenderableType) -> None:
        """Print something for people."""
        for line in lines:
            self.console.print(line)

    def json(self, values: Iterable[Any]) -> None:
        """Print values as JSON, a line each, as they come."""
        for value in values:
            plain = value.to_dict() if hasattr(value, "to_dict") else value
            sys.stdout.write(json.dumps(plain, ensure_ascii=True, allow_nan=False) + "\n")
            sys.stdout.flush()

    def confirm(self, what: str, *, yes: bool) -> None:
        """Say what will happen, and go on only where that is wanted.

        Args:
            what: A sentence.
            yes: Go on without a question.

        Raises:
            typer.BadParameter: Nobody can be asked, and `--yes` isn't given.
            typer.Exit: It isn't wanted.
        """
        if yes:
            return
        if not sys.stdin.isatty():
            raise typer.BadParameter(f"{what} Nobody can be asked here: give --yes")
        typer.echo(what, err=True)
        if not typer.confirm("Go on?", err=True):
            raise typer.Exit(1)

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()


def looks(command: Callable[Concatenate[Looking, P], None]) -> Callable[..., None]:
    """Make a command of a function whose first parameter is a `Looking`; see the module."""
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _SHARED.items()
    ]

    @functools.wraps(command)
    def run(*args: P.args, **given: P.kwargs) -> None:
        values: dict[str, Any] = dict(given)
        as_json, timeout = values.pop("as_json"), values.pop("timeout")
        reach = {name: values.pop(name) for name in connection.OPTIONS}
        look = Looking(connection.Connection(**reach), timeout, as_json)
        with _reported(as_json=as_json):
            try:
                command(look, *args, **values)
            finally:
                look.close()

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + shared
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


Timeout: TypeAlias = Annotated[
    float,
    typer.Option(min=0.1, help="Seconds to wait for an answer.", rich_help_panel="Connection"),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON, one value a line, errors too.")
]
_SHARED: Final[dict[str, tuple[Any, Any]]] = {
    "as_json": (AsJson, False),
    "address": (connection.Address, connection.DEFAULT_ADDRESS),
    "timeout": (Timeout, 10.0),
    "token_file": (connection.TokenFile, None),
    "ca": (connection.Ca, None),
    "certificate": (connection.Certificate, None),
    "key": (connection.Key, None),
    "server_name": (connection.ServerName, ""),
}


@contextmanager
def _reported(*, as_json: bool) -> Iterator[None]:
    """End with a status and one line where it fails for a reason that users can see to."""
    from experience_buffer import errors
    from experience_buffer_server.commands.output import failed

    try:
        yield
    except typer.BadParameter as error:
        if not as_json:
            raise
        raise failed_json("UsageError", error.message, "", 2) from error
    except errors.ExperienceBufferError as error:
        status = 1 if isinstance(error, _no_errors()) else 2
        if as_json:
            raise failed_json(type(error).__name__, str(error), error.status, status) from error
        raise failed(str(error), status=status) from error


def _no_errors() -> tuple[type[Exception], ...]:
    """Errors that are an answer: it isn't there, or not in the state for that."""
    from experience_buffer import errors

    return (
        errors.ExperienceNotFoundError,
        errors.GroupNotFoundError,
        errors.LeaseNotFoundError,
        errors.WrongStateError,
    )


def failed_json(kind: str, message: str, status: str, code: int) -> SystemExit:
    """Say what went wrong as one line of JSON on stderr; what to raise then.

    Args:
        kind: The error's class.
        message: In words.
        status: Name of the gRPC status; empty where no server was asked.
        code: The exit status.
    """
    line = {"error": {"type": kind, "message": message, "status": status}}
    sys.stderr.write(json.dumps(line) + "\n")
    return SystemExit(code)
