"""Devices and threads of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import goldens
from .devices import DEVICES


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DEVICES)
def each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the original implementations on each device."""
    monkeypatch.setattr(goldens, "device", request.param)
