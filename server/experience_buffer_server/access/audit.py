"""The audit log: who was refused, and who administered what.

Lines of the logger `experience_buffer_server.audit`, in the form of all others. A flood of calls
doesn't flood the log: per caller and reason only the first of a minute are written, and all callers
together have a bound, too; what was left out is counted in a line of its own. Strangers have a bound
of their own: they can't hide what those do who are known.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

_log = logging.getLogger("experience_buffer_server.audit")

_WINDOW_SECONDS = 60.0
_MAX_REFUSALS = 5
"""Of one caller and reason, in a minute."""
_MAX_CALLS = 60
"""Of one caller and call that doesn't take the role `operate`, in a minute."""
_MAX_LINES = 300
"""Refusals of all strangers, and of all who are known; in a minute."""
_MAX_CALLS_OF_ALL = 3000
_MAX_TEXT = 200
"""Characters of any text that a caller chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call, as the log names it."""

    who: str
    """The caller's name, or its address if it has none."""
    peer: str
    method: str
    buffer: str = ""
    is_known: bool = False
    """Whether it has a name that a grant gives it."""


class _Lines:
    """Lines of one kind that were written within a minute."""

    def __init__(self, *, of_one: int, of_all: int) -> None:
        self._of_one = of_one
        self._of_all = of_all
        self._total = 0
        self._written: Counter[tuple[str, str]] = Counter()
        self._left_out: Counter[str] = Counter()

    def has_room(self, who: str, what: str) -> bool:
        if self._total < self._of_all and self._written[who, what] < self._of_one:
            self._written[who, what] += 1
            self._total += 1
            return True
        self._left_out[what] += 1
        return False

    def restart(self) -> Counter[str]:
        """Forget the minute; what was left out."""
        left_out, self._left_out = self._left_out, Counter()
        self._written.clear()
        self._total = 0
        return left_out


class Audit:
    """Writes the log. It can be shared between threads.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ends = clock() + _WINDOW_SECONDS
        self._strangers = _Lines(of_one=_MAX_REFUSALS, of_all=_MAX_LINES)
        self._known = _Lines(of_one=_MAX_REFUSALS, of_all=_MAX_LINES)
        self._calls = _Lines(of_one=_MAX_CALLS, of_all=_MAX_CALLS_OF_ALL)

    def refused(self, event: Event, reason: str) -> None:
        """A call was refused; `reason` is one of a fixed few."""
        if self._has_room(self._known if event.is_known else self._strangers, event.who, reason):
            _log.warning("refused", extra=_fields(event) | {"reason": reason})

    def administered(
        self,
        event: Event,
        outcome: str,
        details: dict[str, object],
        *,
        is_bounded: bool = False,
    ) -> None:
        """A call that administers has ended with a status.

        Args:
            event: The call.
            outcome: Name of the status; CANCELLED: it may have been done or not. Failures are
                bounded as refusals are.
            details: From `described`.
            is_bounded: Those that succeeded are bounded, too.
        """
        is_done = outcome in ("OK", "CANCELLED")
        if is_done and is_bounded:
            is_logged = self._has_room(self._calls, event.who, event.method)
        else:
            is_logged = is_done or self._has_room(self._known, event.who, outcome)
        if is_logged:
            extra = _fields(event) | {"outcome": outcome, "request": details}
            _log.info("administered", extra=extra)

    def tick(self) -> None:
        """Say what was left out once a minute has passed."""
        with self._lock:
            if self._clock() < self._ends:
                return
            self._ends = self._clock() + _WINDOW_SECONDS
            refusals = self._strangers.restart() + self._known.restart()
            calls = self._calls.restart()
        for reason, count in sorted(refusals.items()):
            _log.warning("refusals left out", extra={"reason": reason, "count": count})
        for method, count in sorted(calls.items()):
            _log.warning("calls left out", extra={"method": method, "count": count})

    def _has_room(self, lines: _Lines, who: str, what: str) -> bool:
        self.tick()
        with self._lock:
            return lines.has_room(who, what)


def described(request: Message) -> dict[str, object]:
    """What a request asks for, of bounded size: texts are cut, lists and messages only counted."""
    details: dict[str, object] = {}
    for field, value in request.ListFields():
        if isinstance(value, str):
            details[field.name] = value[:_MAX_TEXT]
        elif isinstance(value, bool | int | float):
            details[field.name] = value
        elif isinstance(value, bytes):
            details[field.name] = f"{len(value)} bytes"
        elif isinstance(value, FieldMask):
            details[field.name] = ",".join(value.paths)[:_MAX_TEXT]
        elif isinstance(value, Message):
            details[field.name] = [inner.name for inner, _ in value.ListFields()]
        else:
            details[field.name] = f"{len(value)} of them"
    return details


def _fields(event: Event) -> dict[str, object]:
    fields: dict[str, object] = {"who": event.who, "peer": event.peer, "method": event.method}
    if event.buffer:
        fields["buffer"] = event.buffer[:_MAX_TEXT]
    return fields
