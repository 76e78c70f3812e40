"""The entrance to a server: its certificates and its guard, made from the configuration.

Beyond this machine it is only where what is said is encrypted, and only for callers that it knows.

Files are followed: when one changes, what was read from it is read again. A file that can't be used,
such as one that is half written, changes nothing: what was read before stays in force, and the log and
a metric say so.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experience_buffer_server.access import access_file
from experience_buffer_server.access.audit import Audit
from experience_buffer_server.access.grants import Grants
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import ConfigurationError, Settings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
UNIX_SCHEME = "unix:"


class Entrance:
    """Certificates and guard of one server. Belongs to its event loop.

    Raises:
        ConfigurationError: A file can't be used.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._path = settings.access.file
        self._files: list[Followed] = []
        self.certificates: Certificates | None = None
        # Followed before they are read: a change in between is seen at the first look.
        if settings.tls.paths:
            paths, load = settings.tls.paths, self._load_certificates
            self._files.append(Followed("tls", paths, load, metrics.files_read))
            self.certificates = Certificates(settings.tls)
        if self._path is not None:
            load = self._load_grants
            self._files.append(Followed("access", [self._path], load, metrics.files_read))
        self._newest = self._read()
        self.guard = Guard(
            self._newest,
            Audit(time.monotonic),
            shows_certificates=self.certificates is not None and self.certificates.asks_clients,
            count=metrics.access_refused,
        )

    async def follow(self) -> None:
        """Follow the files, and end calls whose grants end, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for files in self._files:
                await asyncio.to_thread(files.look)
            if self._newest is not None and self._newest is not self.guard.grants:
                self.guard.replace(self._newest)
            self.guard.tick()

    def _load_certificates(self) -> None:
        assert self.certificates is not None
        self.certificates.load()

    def _load_grants(self) -> None:
        """Read them, in a thread; the loop takes them at its next tick."""
        self._newest = self._read()

    def _read(self) -> Grants | None:
        if self._path is None:
            return None
        grants, warning = access_file.load(self._path)
        if warning:
            _log.warning("%s", warning)
        if grants.has_certificates and not (self.certificates and self.certificates.asks_clients):
            _log.warning(
                "access.file %s names certificates, which no client shows without "
                "tls.client_ca_file", self._path,
            )  # fmt: skip
        return grants


class Followed:
    """Files that are read together.

    Args:
        what: Their section of the configuration.
        paths: The files, read before.
        load: Reads them and takes what they hold; called in a thread. It raises
            ConfigurationError, and then has changed nothing.
        count: Called with the section and "ok" or "failed".
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[], None],
        count: Callable[[str, str], None],
    ) -> None:
        self._what = what
        self._paths = paths
        self._load = load
        self._count = count
        self._state = _state(paths)
        self._failure = ""

    def look(self) -> bool:
        """Read the files again if they have changed or couldn't be read; True if they were taken."""
        # Taken before reading: what changes meanwhile is seen at the next look.
        state = _state(self._paths)
        if state == self._state and not self._failure:
            return False
        is_new = state != self._state
        self._state = state
        try:
            self._load()
        except ConfigurationError as error:
            if is_new or str(error) != self._failure:
                self._failure = str(error)
                self._count(self._what, "failed")
                _log.error(
                    "%s: the changed files can't be used, those read before stay in force: %s",
                    self._what, error,
                )  # fmt: skip
            return False
        self._failure = ""
        self._count(self._what, "ok")
        _log.info("%s: read again", self._what)
        return True


def _state(paths: Iterable[Path]) -> list[tuple[int, int, int] | None]:
    """What changes when a file is written or replaced; None for one that isn't there."""
    states: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = path.stat()
            states.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


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
