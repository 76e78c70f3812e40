"""Tiny chunks and nodes, so that a few dozen keys already split, join, grow and shrink them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experience_buffer_server.sampling import sorted_pairs, sum_tree


@contextmanager
def small_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_pairs, "MAX_CHUNK", 4)
        patch.setattr(sorted_pairs, "MIN_CHUNK", 2)
        patch.setattr(sum_tree, "FAN_OUT", 2)
        yield
