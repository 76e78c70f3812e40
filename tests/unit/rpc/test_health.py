"""Whether a server serves, as HTTP asks it; what gRPC asks is in tests/integration/test_lifecycle.py."""

from __future__ import annotations

import asyncio
import time

import pytest

from experience_buffer_server.rpc import health
from experience_buffer_server.rpc.health import Pulse


async def test_it_serves_from_listening_to_draining() -> None:
    draining = asyncio.Event()
    pulse = Pulse(draining)
    assert not await pulse.is_serving()
    pulse.has_begun = True
    assert await pulse.is_serving()
    draining.set()
    assert not await pulse.is_serving()


async def test_a_loop_whose_turns_take_long_is_too_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PULSE_SECONDS", 0.05)
    pulse = Pulse(asyncio.Event())
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)
    with pytest.raises(TimeoutError):
        await pulse.is_serving()
