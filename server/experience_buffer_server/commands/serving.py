"""`experience-buffer serve | health`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from experience_buffer_server.commands import connection
from experience_buffer_server.commands.output import failed


def serve(
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of settings.", show_default="none")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0: a free one.", show_default="50051")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the store.", show_default="./data")
    ] = None,
    memory: Annotated[
        bool | None,
        typer.Option("--memory", help="Store nothing on a disk: nothing survives the server."),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="Address of HTTP: metrics, page, JSON.", show_default="127.0.0.1"),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of HTTP; -1: none; 0: a free one.", show_default="9464"),
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option("--page/--no-page", help="Serve the page.", show_default="page"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json: texts for token ids.", show_default="none"),
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Allow plain text beyond loopback.")
    ] = None,
    update_buffers: Annotated[
        bool | None,
        typer.Option("--update-buffers", help="Stored buffers take over the file's settings."),
    ] = None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    What is given here wins over the environment, and that over the file.
    """
    # gRPC's own log has a line for each connection that fails: whoever knocks could fill a disk.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio

    import uvloop

    from experience_buffer_server import app as server
    from experience_buffer_server.runtime import logs
    from experience_buffer_server.runtime.memory import keep_large_blocks
    from experience_buffer_server.settings.server import ConfigurationError, load_settings
    from experience_buffer_server.store.interface import StoreError

    try:
        if memory and data is not None:
            raise ConfigurationError(
                f"--memory stores nothing in --data {data}: give one of them, --data to keep what is "
                "stored, --memory to try things out"
            )
        settings = load_settings(
            config,
            server={
                "host": host,
                "port": port,
                "metrics_host": metrics_host,
                "metrics_port": metrics_port,
                "page": page,
                "tokenizer": tokenizer,
                "insecure": insecure,
                "update_buffers": update_buffers,
            },
            store={"path": data, "memory": memory},
        )
        logs.configure(settings.server.log_format, settings.server.log_level)
        keep_large_blocks()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            raise SystemExit(runner.run(server.serve(settings)))
    except (ConfigurationError, StoreError) as error:
        raise failed(str(error), status=2) from error


def health(
    address: connection.Address = connection.DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 3.0,
    ca: connection.Ca = None,
    certificate: connection.Certificate = None,
    key: connection.Key = None,
    server_name: connection.ServerName = "",
) -> None:
    """Ask a running server whether it is serving; exit status 0 if it is. Takes no token."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    server = connection.Connection(
        address=address, ca=ca, certificate=certificate, key=key, server_name=server_name
    )
    with server.channel() as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout
            )
        except grpc.RpcError as error:
            typer.echo(f"{address}: {error.code().name}: {error.details()}", err=True)
            raise SystemExit(1) from error
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(f"{address}: {state}")
    raise SystemExit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1)
