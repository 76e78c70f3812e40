"""The service's handlers over a real store, in this process and without sockets.

Whatever a client sends, only typed errors come out: anything else would be INTERNAL on the wire. The
state that calls build up is thrown away now and then. No worker computes advantages here: whole
groups wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from experience_buffer.errors import ExperienceBufferError
from experience_buffer.status import to_status
from experience_buffer_server.buffer.compute.scheduler import Computer
from experience_buffer_server.buffer.registry import Registry
from experience_buffer_server.rpc.gateway import Backend
from experience_buffer_server.rpc.push_codec import read_push, read_push_stream
from experience_buffer_server.rpc.service import Service
from experience_buffer_server.runtime import clock
from experience_buffer_server.runtime.metrics import Metrics
from experience_buffer_server.settings.server import ComputeSection, Settings
from experience_buffer_server.store.errors import as_client_error
from experience_buffer_server.store.interface import StoreError
from experience_buffer_server.store.lmdb.snapshots.snapshots import Snapshots
from experience_buffer_server.store.lmdb.store import LmdbStore
from tests.fuzz.messages import METHODS, Method, unpack

_SOFT_RESET_INPUTS: Final = 500
_HARD_RESET_INPUTS: Final = 50_000
_WAIT_SECONDS: Final = 0.1
"""A call that waits for something is ended then, as by its client."""
_MAX_STATUS_BYTES: Final = 8 * 1024
_CONFIG: Final[dict[str, dict[str, Any]]] = {
    "plain": {"group_by": "none"},
    "groups": {"group_size": 3, "consumers": [{"name": "trainer", "unit": "group"}, "critic"]},
    "replay": {
        "group_by": "none",
        "consumers": [{"name": "trainer", "replay": True, "selector": "prioritized"}],
        "max_items": 20,
        "on_full": "evict",
    },
}


class Context:
    """What handlers ask of a call."""

    def time_remaining(self) -> float:
        """Less than it takes to wait."""
        return 0.1

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Nothing is sent: it ends at once."""
        callback(self)

    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return False

    def invocation_metadata(self) -> tuple[()]:
        return ()


class ServiceTarget:
    """The target: inputs through the handlers over one store, which is renewed now and then."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-store-")
        self._num_inputs = 0
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._open())

    def __call__(self, data: bytes) -> None:
        """Run one input.

        Raises:
            Exception: Anything that a handler lets out but a typed error.
        """
        self._num_inputs += 1
        self._loop.run_until_complete(self._calls(data))

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self._loop.close()
        self._folder.cleanup()

    async def _open(self) -> None:
        path = Path(self._folder.name) / "store"
        shutil.rmtree(path, ignore_errors=True)
        settings = Settings(store={"path": path}, buffers=_CONFIG)
        metrics = Metrics()
        self._store = await LmdbStore.open(path, durability="interval", initial_map_bytes=16 << 20)
        computer = Computer(ComputeSection(device="cpu"), str(path), metrics)
        self._registry = Registry(settings, self._store, computer, metrics)
        await self._registry.load()
        snapshots = Snapshots(settings.snapshots, path, metrics)
        backend = Backend(self._registry, self._store, settings.server, asyncio.Event(), snapshots)
        self._service = Service(backend)
        self._readers = {
            name: partial(read, max_payloads=settings.server.max_push_items)
            for name, read in (("Push", read_push), ("PushStream", read_push_stream))
        }
        self._settings = settings

    async def _close(self) -> None:
        await self._registry.drain()
        await self._store.close()

    async def _clear(self) -> None:
        """Remove all buffers and make the first ones again."""
        for buffer in self._registry.all():
            await self._registry.delete(buffer.name, force=True)
        await self._complete()

    async def _complete(self) -> None:
        """Make the first buffers that a call has deleted."""
        there = {buffer.name for buffer in self._registry.all()}
        for name, settings in self._settings.buffers.items():
            if name not in there:
                await self._registry.create(name, settings)

    async def _calls(self, data: bytes) -> None:
        """Make the calls of an input, one after the other."""
        if self._num_inputs % _HARD_RESET_INPUTS == 0:
            await self._close()
            await self._open()
        elif self._num_inputs % _SOFT_RESET_INPUTS == 0:
            await self._clear()
        calls = unpack(data)
        while calls:
            number, _ = calls[0]
            method = METHODS[number]
            count = 1
            while method.is_stream and count < len(calls) and calls[count][0] == number:
                count += 1
            await self._call(method, [message for _, message in calls[:count]])
            calls = calls[count:]
        self._registry.tick(clock.now())
        await self._complete()

    async def _call(self, method: Method, messages: list[bytes]) -> None:
        try:
            read = self._readers.get(method.name, method.request.FromString)
            requests = [read(message) for message in messages]
        except DecodeError:
            return
        handler = getattr(self._service, method.name)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                if method.is_stream:
                    answers = handler(_each(requests), Context())
                    async with contextlib.aclosing(answers):
                        async for answer in answers:
                            _check_answer(answer)
                elif method.name == "WatchPolicyVersion":
                    async with contextlib.aclosing(handler(requests[0], Context())) as answers:
                        await anext(answers)
                elif method.name == "Scan":
                    async with contextlib.aclosing(handler(requests[0], Context())) as answers:
                        async for answer in answers:
                            _check_answer(answer)
                else:
                    _check_answer(await handler(requests[0], Context()))
        except TimeoutError:
            return
        except (ExperienceBufferError, StoreError) as error:
            _check_status(as_client_error(error))
        assert not self._store.failed.is_set(), self._store.failure


def _check_answer(answer: Message | bytes) -> None:
    """It can be sent, or is written already."""
    if not isinstance(answer, bytes):
        answer.SerializeToString()


def _check_status(error: ExperienceBufferError) -> None:
    status = to_status(error)
    assert status.code.name != "INTERNAL", error
    size = len(status.details.encode()) + len(status.trailing_metadata[0][1])
    assert size <= _MAX_STATUS_BYTES, f"a status of {size} bytes"


async def _each(requests: list[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request
        # So that what is delivered against credits has a chance to come before the stream ends.
        await asyncio.sleep(0)
