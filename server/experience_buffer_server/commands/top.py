"""`experience-buffer top`: a full screen of a server's state that one leaves open.

A thread asks the server, so that keys and resizes are answered while it waits; this one draws. The
terminal is as it was afterwards, however it ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from experience_buffer_server.commands.looking import Looking, looks

if TYPE_CHECKING:
    from experience_buffer import Client, Stats, Trends
    from experience_buffer_server.commands.top_view import Screen

_MOST_TRENDS: Final = 20
_TRENDS_SECONDS: Final = 5.0
"""The server makes a new point of them that often."""
_REDRAW_SECONDS: Final = 1.0
_QUIT: Final = "q"
_LOOK_SECONDS: Final = 5.0
"""How long a look waits for an answer before the server counts as lost."""


@looks
def top(
    look: Looking,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Watch a server on a full screen: what needs a person, rates, buffers, consumers. q quits.

    A server that can't be reached shows its last state, greyed, and is looked for again.
    With --json: the statistics, a line for each look, without a terminal.
    """
    look.timeout = min(look.timeout, _LOOK_SECONDS)
    if look.as_json:
        _stream(look, every)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter("top needs a terminal; status prints once, top --json streams")
    from experience_buffer_server.commands.top_view import Screen

    screen = Screen(look.options.address, every=every)
    with suppress(KeyboardInterrupt), _terminal() as bell:
        watcher = Watcher(look.client, screen, bell)
        watcher.start()
        try:
            _draw(look, screen, watcher, bell)
        finally:
            watcher.stop()


class Bell:
    """Wakes the one who draws: a pipe, which a signal's handler may ring, too."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)

    def ring(self) -> None:
        """Wake it, now or when it waits next. Thread-safe."""
        with suppress(OSError):  # So often already that the pipe is full, or it has gone.
            os.write(self._writes, b"!")

    def wait(self, seconds: float) -> str:
        """The key that was pressed; empty when it was rung, or nothing came in this time."""
        ready, _, _ = select.select([sys.stdin, self._reads], [], [], seconds)
        if self._reads in ready:
            os.read(self._reads, 4096)
        if sys.stdin not in ready:
            return ""
        typed = os.read(sys.stdin.fileno(), 64)
        return typed.decode("ascii", "replace")[:1] or _QUIT  # Its end: the terminal has gone.

    def close(self) -> None:
        """Let go of the pipe."""
        reads, writes, self._reads, self._writes = self._reads, self._writes, -1, -1
        os.close(reads)
        os.close(writes)


class Watcher(threading.Thread):
    """Asks the server again and again, and notes in the screen what it says."""

    def __init__(self, client: Client, screen: Screen, bell: Bell) -> None:
        super().__init__(daemon=True, name="top")
        self._client, self._screen, self._bell = client, screen, bell
        self._now = threading.Event()
        self._stopped = False
        self._trends_time = 0.0

    def look_now(self) -> None:
        """Don't wait for the next time."""
        self._now.set()

    def stop(self) -> None:
        """End after the look that is under way."""
        self._stopped = True
        self._now.set()

    def run(self) -> None:
        """Look until it is stopped."""
        from experience_buffer.errors import ExperienceBufferError

        while not self._stopped:
            try:
                stats = self._client.get_stats()
                self._note(stats, self._trends(stats))
            except ExperienceBufferError as error:
                self._screen.lost = str(error) or type(error).__name__
            self._bell.ring()
            self._now.wait(self._screen.every)
            self._now.clear()

    def _note(self, stats: Stats, trends: dict[str, Trends]) -> None:
        self._screen.stats, self._screen.read_time = stats, time.time()
        if trends:
            self._screen.trends = trends
        self._screen.lost = ""

    def _trends(self, stats: Stats) -> dict[str, Trends]:
        """The buffers' last minutes; of a server that doesn't know them, or too early again, none."""
        from experience_buffer.errors import BufferNotFoundError, UnsupportedError
        from experience_buffer_server.commands.top_view import names_of

        if time.monotonic() - self._trends_time < _TRENDS_SECONDS and self._trends_time:
            return {}
        self._trends_time = time.monotonic()
        found = {}
        for name in names_of(stats, _MOST_TRENDS):
            with suppress(BufferNotFoundError, UnsupportedError):  # It has just been deleted.
                found[name] = self._client.get_trends(name)
        return found


def _draw(look: Looking, screen: Screen, watcher: Watcher, bell: Bell) -> None:
    from rich.live import Live

    console = look.console
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            # Rich notes the size of the terminal when it is asked.
            width, height = console.size
            live.update(screen.draw(width, height, time.time()), refresh=True)
            key = bell.wait(_REDRAW_SECONDS)
            if key.lower() == _QUIT:
                return
            if key == " ":
                watcher.look_now()


@contextmanager
def _terminal() -> Iterator[Bell]:
    """Keys come one by one, unseen; a resize and SIGTERM wake us. All as it was afterwards."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    bell = Bell()

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def resized(number: int, frame: Any) -> None:
        bell.ring()

    handlers = {signal.SIGWINCH: resized, signal.SIGTERM: end, signal.SIGHUP: end}
    were = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setcbreak(descriptor)
        yield bell
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
        for number, handler in were.items():
            signal.signal(number, handler)
        bell.close()


def _stream(look: Looking, every: float) -> None:
    with suppress(KeyboardInterrupt):
        while True:
            look.json([look.client.get_stats()])
            time.sleep(every)
