"""Follows files: when one changes, what was read from it is read again.

A file that can't be used, such as one that is half written, changes nothing: what was read before
stays in force, and the log and a metric say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experience_buffer_server.settings.server import ConfigurationError

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0


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


async def follow(files: Iterable[Followed], tick: Callable[[], None]) -> None:
    """Look at files once a second, and let time pass for those who depend on them."""
    watched = list(files)
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        for one in watched:
            await asyncio.to_thread(one.look)
        tick()


def _state(paths: Iterable[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file is written or replaced; None for one that isn't there."""
    states: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            states.append(None)
        else:
            states.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(states)
