"""Large payloads are read ahead of who asks for them, within bounds, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from experience_buffer_server.store import fetching as module
from experience_buffer_server.store.base import DamagedRecordError, StoreFailedError
from experience_buffer_server.store.fetching import Fetched, Fetching
from experience_buffer_server.store.format import Extent

MEBI = 1 << 20


class Disk:
    """Payloads that are read once they may be; counts what is in memory."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.released: list[str] = []
        self.let = threading.Event()
        self.let.set()
        self._lock = threading.Lock()

    def fetch(self, buffer_id: int, uid: str) -> Fetched | None:
        assert buffer_id == 1
        with self._lock:
            self.read.append(uid)
        assert self.let.wait(10)
        if uid == "small":
            return None
        if uid == "broken":
            raise StoreFailedError("the store can't be read")
        if uid == "bad":
            return Fetched(place(uid), DamagedRecordError("the disk can't read it"), ExitStack())
        memory = ExitStack()
        memory.callback(self.released.append, uid)
        return Fetched(place(uid), memoryview(uid.encode()), memory)

    @property
    def held(self) -> list[str]:
        """What is in memory."""
        left = [uid for uid in self.read if uid not in ("small", "broken", "bad")]
        for uid in self.released:
            left.remove(uid)
        return sorted(left)


def place(uid: str) -> tuple[bytes, Extent]:
    return uid.encode(), Extent(0, len(uid), b"8 bytes.")


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def fetching(disk: Disk) -> AsyncIterator[Fetching]:
    fetching = Fetching(disk.fetch)
    yield fetching
    disk.let.set()
    fetching.close()
    await settled()
    assert fetching.find(place("a")) is None
    assert (fetching._held, fetching._expected, fetching._ahead_bytes) == ({}, {}, 0)
    assert disk.held == []


async def settled() -> None:
    """Let threads and callbacks come to their end."""
    for _ in range(20):
        await asyncio.sleep(0.005)


def found(fetching: Fetching, uid: str) -> bytes | None:
    view = fetching.find(place(uid))
    assert not isinstance(view, DamagedRecordError)
    return None if view is None else bytes(view)


async def test_a_payload_is_there_within_the_block(disk: Disk, fetching: Fetching) -> None:
    async with fetching.fetched(1, ["a", "small", "b"]):
        assert (found(fetching, "a"), found(fetching, "b")) == (b"a", b"b")
        assert found(fetching, "small") is None
        assert fetching.find((b"a", Extent(4096, 1, b"8 bytes."))) is None, "it was replaced"
    assert found(fetching, "a") is None


async def test_two_have_the_same_payload_at_once(disk: Disk, fetching: Fetching) -> None:
    async with fetching.fetched(1, ["a"]):
        async with fetching.fetched(1, ["a", "a"]):
            assert disk.read == ["a", "a", "a"]
        assert found(fetching, "a") == b"a"


async def test_what_is_expected_is_read_once_and_given_to_who_asks(
    disk: Disk, fetching: Fetching
) -> None:
    expected = fetching.expect(1, [("a", MEBI), ("b", MEBI)])
    await settled()
    assert sorted(disk.read) == ["a", "b"]
    assert found(fetching, "a") is None, "nobody has asked yet"
    async with fetching.fetched(1, ["a"]):
        assert found(fetching, "a") == b"a"
    await settled()
    assert disk.held == ["b"], "who asked once has had it"
    expected.close()
    expected.close()
    await settled()
    assert disk.held == []
    assert sorted(disk.read) == ["a", "b"]


async def test_a_lease_has_no_more_read_ahead_than_is_left_for_others(
    disk: Disk, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_AHEAD_BYTES", 4 * MEBI)
    first = fetching.expect(1, [("a", MEBI), ("b", MEBI), ("c", MEBI)])
    second = fetching.expect(1, [("d", 2 * MEBI), ("e", MEBI), ("f", MEBI)])
    third = fetching.expect(1, [("g", MEBI)])
    await settled()
    assert sorted(disk.read) == ["a", "b", "d"]
    async with fetching.fetched(1, ["e"]):
        assert found(fetching, "e") == b"e", "who asks doesn't wait for room"
    async with fetching.fetched(1, ["a"]):
        await settled()
        assert sorted(disk.read) == ["a", "b", "d", "e"], "a lease makes room for others, too"
    async with fetching.fetched(1, ["b"]):
        await settled()
    assert sorted(disk.read) == ["a", "b", "c", "d", "e"], "or goes on itself"
    for expected in (second, third, first):
        expected.close()
    await settled()
    assert sorted(disk.read) == ["a", "b", "c", "d", "e"], "nothing for nobody"
    alone = fetching.expect(1, [("huge", 9 * MEBI), ("a", MEBI)])
    await settled()
    assert disk.held == ["huge"], "alone, anything is read ahead"
    alone.close()


async def test_why_a_payload_cannot_be_read_is_there_in_its_place(
    disk: Disk, fetching: Fetching
) -> None:
    async with fetching.fetched(1, ["bad"]):
        assert isinstance(fetching.find(place("bad")), DamagedRecordError)
    assert fetching.find(place("bad")) is None


async def test_who_goes_away_leaves_nothing(disk: Disk, fetching: Fetching) -> None:
    disk.let.clear()
    expected = fetching.expect(1, [("a", MEBI)])
    entered = False

    async def ask() -> None:
        nonlocal entered
        async with fetching.fetched(1, ["a", "b"]):
            entered = True

    task = asyncio.create_task(ask())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.let.set()
    expected.close()
    await settled()
    assert (entered, sorted(disk.read), disk.held) == (False, ["a", "b"], [])


async def test_a_store_that_fails_tells_who_asks_and_keeps_nothing(
    disk: Disk, fetching: Fetching
) -> None:
    expected = fetching.expect(1, [("broken", MEBI), ("broken", MEBI)])
    with pytest.raises(StoreFailedError):
        async with fetching.fetched(1, ["a", "broken", "b"]):
            pytest.fail("it wasn't read")
    expected.close()
    await settled()
