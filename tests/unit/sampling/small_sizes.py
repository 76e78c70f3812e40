"""Tiny chunks, so that a few dozen keys already split and join them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experience_buffer_server.sampling import sorted_pairs


@contextmanager
def small_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_pairs, "MAX_CHUNK", 4)
        patch.setattr(sorted_pairs, "MIN_CHUNK", 2)
        yield
