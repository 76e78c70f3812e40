"""What a channel is made of: target, arguments, credentials, metadata. Opens no connection."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import warnings
from pathlib import Path
from typing import Any, Final

import grpc

from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import ClientOptions, TlsOptions

DEFAULT_PORT: Final = 50051
_SCHEMES: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "passthrough:")


def parse_address(address: str) -> str:
    """The gRPC target of an address.

    Args:
        address: "host", "host:port", "[v6 address]:port", or a gRPC target such as
            "unix:/run/buffer.sock" or "dns:///host:port". The port defaults to 50051.

    Raises:
        InvalidRequestError: None of these forms.
    """
    if address.startswith(_SCHEMES):
        return address
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?", address)
    if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65536:
        raise InvalidRequestError(
            f"address {address!r} is none of 'host', 'host:port', '[v6 address]:port', 'unix:path'",
            subject="address",
        )
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"


def is_local(target: str) -> bool:
    """Whether what is sent to this target stays on the machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = re.sub(r"^(dns|ipv4|ipv6|passthrough):/*", "", target).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def arguments(
    options: ClientOptions, tls: TlsOptions | None, *, target: str = ""
) -> list[tuple[str, Any]]:
    """The channel arguments."""
    args: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        # The client has its own retries: gRPC's stop silently above 256 KiB.
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        # A restarted server is found again in seconds, not in gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # Each client has its own connection and doesn't wait out another one's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if options.keepalive_seconds > 0:
        args += [
            ("grpc.keepalive_time_ms", _milliseconds(options.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", _milliseconds(options.keepalive_timeout_seconds)),
            # Without it a ping has a minute, whatever the line above says.
            ("grpc.http2.ping_timeout_ms", _milliseconds(options.keepalive_timeout_seconds)),
            # An idle stream still pings: a sample stream may wait for hours.
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if is_local(target):
        # What is for this machine mustn't leave it by a proxy that the environment names.
        args.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        args.append(("grpc.ssl_target_name_override", tls.server_name))
    return args


def _milliseconds(seconds: float) -> int:
    """What gRPC counts in: 32 bits of them are 24 days."""
    return int(min(seconds * 1000, 2**31 - 1))


class _Uses:
    """Whether gRPC was used in this process, or in the one that it was forked from."""

    here = False
    before_fork = False

    @classmethod
    def forked(cls) -> None:
        cls.before_fork = cls.before_fork or cls.here
        cls.here = False


os.register_at_fork(after_in_child=_Uses.forked)


def note_use() -> None:
    """Say that a channel is made in this process; warns where gRPC may not survive that."""
    if _Uses.before_fork and not _Uses.here:
        warnings.warn(
            "this process was forked from one that had used gRPC: its locks may be held for ever, "
            "and calls may hang or crash. Start workers by spawn or forkserver, for a DataLoader "
            'with multiprocessing_context="spawn", or before the first call',
            RuntimeWarning,
            stacklevel=2,
        )
    _Uses.here = True


def credentials(tls: TlsOptions) -> grpc.ChannelCredentials:
    """Read the files and make the channel's credentials.

    Raises:
        InvalidRequestError: A file can't be read, or holds no certificate, or not the key of it.
    """

    def read(name: str) -> bytes | None:
        path = getattr(tls, name)
        try:
            return None if path is None else Path(path).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{name} of tls: {error}", subject=name) from error

    made = grpc.ssl_channel_credentials(
        root_certificates=read("ca_file"),
        private_key=read("key_file"),
        certificate_chain=read("certificate_file"),
    )
    _check_files(tls)
    return made


def _check_files(tls: TlsOptions) -> None:
    """Look into the files: gRPC would only say that there is no connection, again and again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # What is too weak for this library may do for gRPC's.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    # A pipe has been read to its end.
    if tls.ca_file is not None and Path(tls.ca_file).is_file():
        try:
            context.load_verify_locations(tls.ca_file)
        except OSError as error:
            if not context.cert_store_stats()["x509"]:
                raise InvalidRequestError(
                    f"ca_file of tls: {tls.ca_file} doesn't hold CA certificates as PEM: {error}",
                    subject="ca_file",
                ) from error
    files = [path for path in (tls.certificate_file, tls.key_file) if path is not None]
    if tls.certificate_file is not None and all(Path(path).is_file() for path in files):
        try:
            # An encrypted key is no use to gRPC; without this it would be asked for.
            context.load_cert_chain(tls.certificate_file, tls.key_file, password="")
        except OSError as error:
            raise InvalidRequestError(
                f"certificate_file of tls: {' and '.join(map(str, files))} don't hold a certificate "
                f"and its key as PEM, not encrypted: {error}",
                subject="certificate_file",
            ) from error


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that every call carries.

    Raises:
        InvalidRequestError: The token has characters that no token has; they aren't repeated in the text.
    """
    if token is None:
        return ()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequestError(
            f"the token has {len(token)} characters, not all of them printable ASCII without white "
            "space; strip() removes the end of a line that was read from a file",
            subject="token",
        )
    return (("authorization", f"Bearer {token}"),)
