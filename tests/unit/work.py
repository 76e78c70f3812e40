"""How much work something is: counted, as seconds say more of the machine and of who else is at work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


class Work:
    """What has been done so far."""

    def __init__(self) -> None:
        self.num = 0


@contextmanager
def counted_lines() -> Iterator[Work]:
    """Count the lines of Python that this thread runs within."""
    work = Work()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        work.num += event == "line"
        return count

    before = sys.gettrace()
    # What the collector finalizes of other tests would be counted, too.
    gc.disable()
    sys.settrace(count)
    try:
        yield work
    finally:
        sys.settrace(before)
        gc.enable()


def counted_comparisons(monkeypatch: pytest.MonkeyPatch, kind: type) -> Work:
    """Count what lines don't tell of: how often a list is looked through for objects of a kind."""
    work = Work()

    def same(self: object, other: object) -> bool:
        work.num += 1
        return self is other

    monkeypatch.setattr(kind, "__eq__", same)
    return work
