"""Where a server may listen: beyond this machine only encrypted, and only for callers it knows."""

from __future__ import annotations

import ipaddress

from experience_buffer_server.settings.server import ConfigurationError, Settings

UNIX_SCHEME = "unix:"


def check_exposure(settings: Settings) -> None:
    """Refuse to serve other machines in plain text, or whoever comes, unless told so.

    Raises:
        ConfigurationError: An address is reachable from other machines, `insecure` isn't set, and
            there is no TLS, or neither tokens nor certificates of clients.
    """
    server = settings.server
    if server.insecure:
        return
    hosts = {"server.host": server.host}
    if server.metrics_port >= 0:
        hosts["server.metrics_host"] = server.metrics_host
    for key, host in hosts.items():
        if is_local(host):
            continue
        if settings.tls.certificate_file is None:
            raise ConfigurationError(
                f"{key}: {host!r} is reachable from other machines in plain text; bind 127.0.0.1, "
                "or set tls.certificate_file and tls.key_file, or pass --insecure "
                "(server.insecure = true) on a trusted network"
            )
        if settings.access.file is None and settings.tls.client_ca_file is None:
            raise ConfigurationError(
                f"{key}: {host!r} is reachable from other machines, and everyone there could read, "
                "write and delete everything; set access.file for tokens or tls.client_ca_file for "
                "certificates, or pass --insecure (server.insecure = true) on a trusted network"
            )


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens on a host of the configuration."""
    if host.startswith(UNIX_SCHEME):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def target(host: str, port: int) -> str:
    """What gRPC listens on."""
    if host.startswith(UNIX_SCHEME):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
