"""Waking a worker when the trainer publishes a policy."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from examples.demo.settings import BUFFER
from experience_buffer import Client


class PolicyWatch:
    """Listens for policy versions in a thread of its own; a context manager for one other thread."""

    def __init__(self, client: Client) -> None:
        self._versions = client.watch_policy_version(BUFFER)
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="policy watch", daemon=True)

    def wait(self, seconds: float) -> None:
        """Wait until a version is published, for so long at most; not if one was since last time.

        Raises:
            RuntimeError: There will be none: the server has been away for too long.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the watch of the policy version has ended")
        self._news.wait(seconds)
        self._news.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._versions.close()
        self._thread.join()

    def _listen(self) -> None:
        for _ in self._versions:
            self._news.set()
