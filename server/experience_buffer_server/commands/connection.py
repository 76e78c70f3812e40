"""What all commands that talk to a server take: its address, TLS files and a token.

The client is imported when it is needed, so that all other commands start faster.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

if TYPE_CHECKING:
    import grpc

    from experience_buffer import Client, TlsOptions

DEFAULT_ADDRESS = "127.0.0.1:50051"
OPTIONS: Final = ("address", "token_file", "ca", "certificate", "key", "server_name")
"""Names of the options that say how to reach a server."""


def variable(option: str) -> str:
    """The environment variable that stands for one of these options."""
    return f"EXPERIENCE_BUFFER_{option.upper()}"


_PANEL: Final = "Connection"

Address: TypeAlias = Annotated[
    str,
    typer.Option(help="host:port of a server.", envvar=variable("address"), rich_help_panel=_PANEL),
]
Ca: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        help="PEM certificates to check the server's against.",
        envvar=variable("ca"),
        rich_help_panel=_PANEL,
    ),
]
Certificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        help="PEM certificate to show to the server.",
        envvar=variable("certificate"),
        rich_help_panel=_PANEL,
    ),
]
Key: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--key",
        help="PEM private key of the certificate.",
        envvar=variable("key"),
        rich_help_panel=_PANEL,
    ),
]
ServerName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--server-name",
        help="Name in the server's certificate, if not the host.",
        envvar=variable("server_name"),
        rich_help_panel=_PANEL,
    ),
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with a token; never on the command line.",
        envvar=variable("token_file"),
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options as given; files are read when they are needed.

    TLS is used as soon as one of its options is given.
    """

    address: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token_file: Path | None = None

    def client(self, *, timeout: float, patient: bool = True, large: bool = False) -> Client:
        """Make a client; the caller closes it.

        Args:
            timeout: Seconds for each call.
            patient: Whether a call waits for a server that isn't there yet.
            large: Whether it takes messages twice as large as servers do by default: the largest
                payload, and what was computed beside it.

        Raises:
            typer.BadParameter: A file can't be read, or options contradict each other.
        """
        from experience_buffer import Client, ClientOptions, RetryOptions

        token, tls = self.token(), self.tls()
        try:
            options = ClientOptions(retry=RetryOptions(max_attempts=0 if patient else 1))
            if large:
                options = replace(options, max_message_bytes=2 * options.max_message_bytes)
            return Client(self.address, token=token, tls=tls, timeout=timeout, options=options)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def channel(self) -> grpc.Channel:
        """Make a plain channel, for services that the client doesn't know.

        Raises:
            typer.BadParameter: A file can't be read, or options contradict each other.
        """
        import grpc

        from experience_buffer import ClientOptions
        from experience_buffer._transport import channel as _channel

        tls = self.tls()
        try:
            target = _channel.parse_address(self.address)
            arguments = _channel.arguments(ClientOptions(), tls, target=target)
            if tls is None:
                return grpc.insecure_channel(target, arguments)
            return grpc.secure_channel(target, _channel.credentials(tls), arguments)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error

    def tls(self) -> TlsOptions | None:
        """The TLS options; None: plain text."""
        if not (self.ca or self.certificate or self.key or self.server_name):
            return None
        from experience_buffer import TlsOptions

        try:
            return TlsOptions(
                ca_file=_text(self.ca),
                certificate_file=_text(self.certificate),
                key_file=_text(self.key),
                server_name=self.server_name,
            )
        except ValueError as error:
            raise typer.BadParameter(f"--certificate, --key: {error}") from error

    def token(self) -> str | None:
        """The token in the file, without the white space around it.

        Raises:
            typer.BadParameter: The file can't be read, or holds no single token.
        """
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--token-file: {error}") from error
        if not token or len(token.split()) != 1:
            raise typer.BadParameter(f"--token-file: {self.token_file} must hold one token")
        if self.token_file.stat().st_mode & stat.S_IROTH:
            typer.echo(
                f"warning: --token-file {self.token_file} can be read by every user of this "
                "machine: chmod 600",
                err=True,
            )
        return token


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
