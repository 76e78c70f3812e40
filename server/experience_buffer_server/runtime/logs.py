"""Structured logs: one JSON object per line, or readable lines on a terminal."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What ends lines, moves the cursor, or changes the direction of what follows."""


def _escaped(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", ...}`; fields given as `extra` are kept."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record as a JSON object without line breaks."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """`12:34:56 INFO listening address=127.0.0.1:50051`."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record as a line, an exception below it."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(
            f" {key}={value}" for key, value in vars(record).items() if key not in _STANDARD
        )
        # Callers choose some of the texts: no line of theirs may look like one of the server's.
        said = _CONTROL.sub(_escaped, f"{record.getMessage()}{extra}")
        text = f"{clock} {record.levelname} {said}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(log_format: str, level: str) -> None:
    """Send all logs to standard error.

    Args:
        log_format: "text", "json", or "auto": text on a terminal, else JSON.
        level: A level's name.
    """
    if log_format == "auto":
        log_format = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter() if log_format == "text" else JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_hang_up)


def _is_no_hang_up(record: logging.LogRecord) -> bool:
    """False for what gRPC calls an error though a client has merely gone while it was sent to."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")
