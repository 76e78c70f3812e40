"""A program in a pseudo-terminal, and what its screen shows: enough of a terminal for the tests."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b([()][A-Z0-9]|[=>78])")
_SECONDS = 20.0


class Screen:
    """Lines of text that a cursor writes on; colours are left out."""

    def __init__(self, width: int, height: int) -> None:
        self.is_alternate = False
        self.is_cursor_shown = True
        self.odd: list[str] = []
        """Sequences that no program of ours has a reason to write."""
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Begin anew with another size."""
        self.width, self.height = width, height
        self._lines = [""] * height
        self._row = self._column = 0

    @property
    def text(self) -> str:
        """What it shows."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip()

    def write(self, text: str) -> str:
        """Take output; returns the beginning of a sequence that isn't whole yet."""
        while text:
            if text[0] != "\x1b":
                end = text.find("\x1b")
                plain = text if end < 0 else text[:end]
                for character in plain:
                    self._put(character)
                text = text[len(plain) :]
            elif found := _SEQUENCE.match(text):
                self._do(found[1] or "", found[2] or "")
                text = text[found.end() :]
            elif len(text) < 16:
                return text
            else:
                self.odd.append(text[:16])
                text = text[1:]
        return ""

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row = min(self._row + 1, self.height - 1)
        elif character == "\r":
            self._column = 0
        elif character < " ":
            self.odd.append(repr(character))
        else:
            # A frame is drawn from its top, each line whole: what was there before goes.
            line = self._lines[self._row].ljust(self._column) if self._column else ""
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _do(self, arguments: str, what: str) -> None:
        if (arguments, what) in (("?1049", "h"), ("?1049", "l")):
            self.is_alternate = what == "h"
            self.resize(self.width, self.height)
        elif arguments == "?25":
            self.is_cursor_shown = what == "h"
        elif what == "H":
            row, _, column = arguments.partition(";")
            self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
        elif what == "J" and arguments in ("2", "3"):
            self._lines = [""] * self.height
        elif what == "K":
            self._lines[self._row] = self._lines[self._row][: self._column]
        elif what == "A":
            self._row = max(self._row - int(arguments or 1), 0)
        elif what != "m":
            self.odd.append(f"{arguments}{what}")


class Program:
    """A program whose terminal is ours; a context manager that ends it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        width: int = 100,
        height: int = 30,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = Screen(width, height)
        self._ours, theirs = pty.openpty()
        self._size(width, height)
        self.settings = termios.tcgetattr(theirs)
        self._theirs = theirs
        others = {
            key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")
        }
        self._process = subprocess.Popen(
            # A session of its own, so that Ctrl-C is a signal to it. Not by `preexec_fn`: code in a fork of a
            # process that has gRPC's threads may abort.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=others | {"TERM": "xterm-256color"} | dict(environment or {}),
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.output = ""
        """All that it wrote."""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def resize(self, width: int, height: int) -> None:
        """Make the terminal's window another size."""
        self.screen.resize(width, height)
        self._size(width, height)  # Which is a signal to it.

    def until(self, holds: Callable[[str], bool], what: str) -> str:
        """Read on until the screen shows it; what it shows."""
        end = time.monotonic() + _SECONDS
        while not holds(self.screen.text):
            assert time.monotonic() < end, f"never {what}; it shows:\n{self.screen.text}"
            self._read(0.1)
        return self.screen.text

    def ended(self) -> int:
        """Read until it has ended; its exit status."""
        end = time.monotonic() + _SECONDS
        while self._process.poll() is None:
            assert time.monotonic() < end, f"it doesn't end; it shows:\n{self.screen.text}"
            self._read(0.1)
        self._read(0.0)
        return self._process.returncode

    def is_as_before(self) -> bool:
        """Whether the terminal is set as it was, shows its first screen, and has its cursor."""
        now = termios.tcgetattr(self._theirs)
        shown = not self.screen.is_alternate and self.screen.is_cursor_shown
        return now == self.settings and shown

    def _size(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._ours], [], [], seconds)
        while ready:
            text = self._decoder.decode(os.read(self._ours, 65536))
            self.output += text
            self._rest = self.screen.write(self._rest + text)
            ready, _, _ = select.select([self._ours], [], [], 0.0)
