"""Brings the compiled reader into a running server.

Loading it takes part of a second, and 40 MB of memory. Where it wasn't compiled before, that
happens in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from experience_buffer.trxp import Limits
from experience_buffer_server.buffer.intake.admission import Compiled, PayloadReader

_log = logging.getLogger(__name__)

_WITHOUT: Final = "payloads are read without compiled code, which takes longer: %s"
_SWITCH_SECONDS: Final = 0.0005
"""How long the event loop waits for the interpreter while it is imported; Python's own 5 ms add up."""


class _NotKeptError(RuntimeError):
    """It would have to be compiled."""


class Loading:
    """Lets compiled code read what it knows. Not thread-safe; belongs to the event loop.

    Where that can't be, the reason is logged, and everything is read without it.

    Args:
        payloads: Receives the compiled reader.
    """

    def __init__(self, payloads: PayloadReader) -> None:
        self._payloads = payloads
        self._compiling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load it; where it has to be compiled, that only begins."""
        if not await self._load():
            _log.info(
                "the reader of payloads is being compiled; they are read without it until then"
            )
            self._compiling = asyncio.get_running_loop().create_task(self._compile())

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        if self._compiling is not None:
            self._compiling.cancel()
            await asyncio.wait([self._compiling])

    async def _load(self) -> bool:
        """Load what was kept, if there is anything; False if it has to be compiled first."""
        try:
            self._payloads.compiled = await asyncio.to_thread(_loaded, self._payloads.limits)
        except _NotKeptError:
            return False
        except Exception as error:
            # What numba has kept are pickles of its own, trusted like the `.pyc` files beside them.
            # Where they are damaged anything may be raised, and the server can do without them.
            what = f"{type(error).__name__}: {error}"
            _log.warning(_WITHOUT, f"what was compiled can't be loaded; delete it ({what})")
        return True

    async def _compile(self) -> None:
        started = time.monotonic()
        try:
            await _compile()
        except (OSError, RuntimeError) as error:
            _log.warning(_WITHOUT, error)
            return
        if not await self._load():
            _log.warning(_WITHOUT, "what was compiled isn't found again")
        elif self._payloads.compiled is not None:
            seconds = round(time.monotonic() - started, 1)
            _log.info("payloads are read by compiled code now", extra={"seconds": seconds})


async def _compile() -> None:
    """See that what was compiled is on the disk.

    Raises:
        RuntimeError: It can't be.
        OSError: No process could be started.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "experience_buffer_server.buffer.intake.compiled",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C in a terminal reaches every process of the session's foreground group.
        start_new_session=True,
    )
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = said.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"{lines[-1]} (exit status {process.returncode})")


def _loaded(limits: Limits) -> Compiled:
    """Load what was kept.

    Raises:
        _NotKeptError: It wasn't.
    """
    with _short_switches():
        from numba.core import event

        class Refusal(event.Listener):
            """Keeps this process, whose interpreter is needed elsewhere, from compiling."""

            def on_start(self, event: object) -> None:
                raise _NotKeptError("what was compiled isn't there to be loaded")

            def on_end(self, event: object) -> None:
                """It never comes to that."""

        with event.install_listener("numba:compile", Refusal()):
            from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader

        return CompiledReader(limits)


@contextmanager
def _short_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
