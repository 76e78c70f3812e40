"""The entrance to a server: its certificates and its guard, made from the configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experience_buffer_server.access import access_file
from experience_buffer_server.access.audit import Audit
from experience_buffer_server.access.grants import Grants
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.access.reload import Followed, follow
from experience_buffer_server.access.tls import Certificates
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import Settings

_log = logging.getLogger(__name__)


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
            self._follow("tls", settings.tls.paths, self._load_certificates, metrics)
            self.certificates = Certificates(settings.tls)
        if self._path is not None:
            self._follow("access", [self._path], self._load_grants, metrics)
        self._newest = self._read()
        self.guard = Guard(
            self._newest,
            Audit(time.monotonic),
            shows_certificates=self.certificates is not None and self.certificates.asks_clients,
            count=metrics.access_refused,
        )

    def _follow(
        self, section: str, paths: Sequence[Path], load: Callable[[], None], metrics: Metrics
    ) -> None:
        self._files.append(Followed(section, paths, load, metrics.files_read))

    async def follow(self) -> None:
        """Follow the files, and end calls whose grants end, until cancelled."""
        await follow(self._files, self._tick)

    def _tick(self) -> None:
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
