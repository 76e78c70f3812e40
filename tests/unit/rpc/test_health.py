"""Whether a server serves, asked from a thread of another kind than those that serve."""

from __future__ import annotations

import asyncio
import threading

import pytest

from experience_buffer_server.rpc import health
from experience_buffer_server.rpc.health import Pulse


async def test_it_serves_from_listening_to_draining() -> None:
    draining = asyncio.Event()
    pulse = Pulse(draining, asyncio.get_running_loop())
    assert not await asyncio.to_thread(pulse.is_serving)
    pulse.has_begun = True
    assert await asyncio.to_thread(pulse.is_serving)
    draining.set()
    assert not await asyncio.to_thread(pulse.is_serving)


async def test_a_loop_that_hangs_has_no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PULSE_SECONDS", 0.05)
    pulse = Pulse(asyncio.Event(), asyncio.get_running_loop())
    found: list[BaseException] = []

    def ask() -> None:
        try:
            pulse.is_serving()
        except TimeoutError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()  # This is the loop's thread: it answers nobody meanwhile.
    assert len(found) == 1
