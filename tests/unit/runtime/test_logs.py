"""Lines of the log, whatever callers put into them."""

from __future__ import annotations

import json
import logging

from experience_buffer_server.runtime.logs import JsonFormatter, TextFormatter


def test_a_text_of_a_caller_makes_no_line_of_its_own() -> None:
    forged = "x\n12:00:00 WARNING refused\x1b[2K\u202e\u2028\x85 \u00e9"
    record = logging.makeLogRecord({"msg": "administered", "who": forged})
    text = TextFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert "\\n12:00:00" in text
    assert text.endswith("\\x1b[2K\\u202e\\u2028\\x85 \u00e9")


def test_a_log_line_is_one_json_object() -> None:
    record = logging.makeLogRecord(
        {"msg": "two\nlines %d", "args": (7,), "levelname": "INFO", "name": "x", "port": 11}
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["message"], entry["port"], entry["level"]) == ("two\nlines 7", 11, "INFO")
