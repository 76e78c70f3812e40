"""Large payloads are read ahead of who asks for them, within bounds, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

import pytest

from experience_buffer_server.store.interface import DamagedRecordError, StoreFailedError
from experience_buffer_server.store.lmdb.disk.format import Extent
from experience_buffer_server.store.lmdb.large import fetching as module
from experience_buffer_server.store.lmdb.large.fetching import Expected, Fetching
from experience_buffer_server.store.lmdb.large.reads import Place, Together
from tests.unit.store.conftest import MEBI


class Disk:
    """Payloads of 1 MiB, far from each other but for `side1`, `side2` ..., that are read once they may be."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.released: list[str] = []
        """What was read together ends together, by the name of the first."""
        self.find_error: Exception | None = None
        self.num_found = 0
        self.let = threading.Event()
        self.let.set()
        self._lock = threading.Lock()

    def find(self, buffer_id: int, uids: Sequence[str]) -> list[Place | None]:
        assert buffer_id == 1
        self.num_found += len(uids)
        if self.find_error is not None:
            raise self.find_error
        return [None if uid.startswith("small") else place(uid) for uid in uids]

    def fetch(self, places: Sequence[Place]) -> Together:
        names = [key.decode() for key, _ in places]
        with self._lock:
            self.read.append("+".join(names))
        assert self.let.wait(10)
        if "broken" in names:
            raise StoreFailedError("the store can't be read")
        if names == ["bad"]:
            return Together([DamagedRecordError("the disk can't read it")], ExitStack())
        stack = ExitStack()
        stack.callback(self.released.append, "+".join(names))
        return Together([memoryview(key) for key, _ in places], stack)

    @property
    def held(self) -> list[str]:
        """What is in memory."""
        left = [name for name in self.read if name not in ("broken", "bad")]
        for name in self.released:
            left.remove(name)
        return sorted(left)


def place(uid: str) -> Place:
    if uid.startswith("side"):
        return uid.encode(), Extent(int(uid[4:]) * MEBI, MEBI, b"8 bytes.")
    number = int.from_bytes(uid.encode())
    return uid.encode(), Extent((100 + 20 * number) * MEBI, sizes.get(uid, MEBI), b"8 bytes.")


sizes = {"huge": 9 * MEBI, "d": 2 * MEBI}


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def fetching(disk: Disk) -> AsyncIterator[Fetching]:
    fetching = Fetching(disk.find, disk.fetch)
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
            assert disk.read == ["a", "a"]
        assert found(fetching, "a") == b"a"


async def test_what_is_expected_is_read_once_and_given_to_who_asks(
    disk: Disk, fetching: Fetching
) -> None:
    expected = Expected(fetching, 1, [("a", MEBI), ("b", MEBI)])
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
    monkeypatch.setattr(module, "MOST_AT_ONCE_BYTES", MEBI)
    first = Expected(fetching, 1, [("a", MEBI), ("b", MEBI), ("c", MEBI)])
    second = Expected(fetching, 1, [("d", 2 * MEBI), ("e", MEBI), ("f", MEBI)])
    third = Expected(fetching, 1, [("g", MEBI)])
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
    alone = Expected(fetching, 1, [("huge", 9 * MEBI), ("a", MEBI)])
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
    expected = Expected(fetching, 1, [("a", MEBI)])
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
    expected = Expected(fetching, 1, [("broken", MEBI), ("broken", MEBI)])
    with pytest.raises(StoreFailedError):
        async with fetching.fetched(1, ["a", "broken", "b"]):
            pytest.fail("it wasn't read")
    expected.close()
    await settled()
    expected = Expected(fetching, 1, [("a", MEBI), ("b", MEBI)])
    disk.find_error = StoreFailedError("the store can't be read")
    with pytest.raises(StoreFailedError):
        async with fetching.fetched(1, ["a", "c"]):
            pytest.fail("it wasn't found")
    alone = Expected(fetching, 1, [("c", MEBI)])
    for each in (expected, alone):
        each.close()


async def test_what_lies_side_by_side_is_read_at_once(disk: Disk, fetching: Fetching) -> None:
    async with fetching.fetched(1, ["side3", "a", "small", "side2", "side7", "side4"]):
        assert sorted(disk.read) == ["a", "side2+side3+side4", "side7"]
        for uid in ("side3", "a", "side2", "side7", "side4"):
            assert found(fetching, uid) == uid.encode()
    assert disk.held == []


async def test_memory_of_neighbours_is_kept_until_the_last_is_used(
    disk: Disk, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And counts as read ahead for as long, or many leases that are half used would take without bounds."""
    monkeypatch.setattr(module, "_MOST_AHEAD_BYTES", 5 * MEBI)
    first = Expected(
        fetching, 1, [("side1", MEBI), ("side2", MEBI), ("small", MEBI), ("side3", MEBI)]
    )
    second = Expected(fetching, 1, [("a", MEBI), ("b", MEBI), ("c", MEBI), ("d", 2 * MEBI)])
    await settled()
    assert disk.read == ["side1+side2+side3"]
    async with fetching.fetched(1, ["side1", "side2", "small"]):
        assert found(fetching, "side2") == b"side2"
    second.go_on()
    await settled()
    assert disk.held == ["side1+side2+side3"]
    assert fetching._ahead_bytes == 3 * MEBI
    async with fetching.fetched(1, ["side3"]):
        assert fetching._ahead_bytes == 0, "what is used counts elsewhere"
        second.go_on()
        await settled()
        assert disk.held == ["a", "b", "c", "side1+side2+side3"]
    assert disk.held == ["a", "b", "c"]
    assert fetching._ahead_bytes == 3 * MEBI, "half of the room is left for others"
    for expected in (first, second):
        expected.close()


async def test_who_asks_for_more_than_is_read_ahead_waits_for_all_of_it(
    disk: Disk, fetching: Fetching
) -> None:
    expected = Expected(fetching, 1, [(f"side{number}", MEBI) for number in range(1, 9)])
    async with fetching.fetched(1, [f"side{number}" for number in range(1, 11)]):
        assert disk.read == ["side1+side2+side3+side4", "side5+side6+side7+side8", "side9+side10"]
    assert (disk.held, fetching._ahead_bytes) == ([], 0)
    expected.close()


async def test_one_of_neighbours_is_given_up_while_it_is_read(
    disk: Disk, fetching: Fetching
) -> None:
    disk.let.clear()
    expected = Expected(fetching, 1, [("side1", MEBI), ("side2", MEBI)])
    task = asyncio.create_task(_have(fetching, "side1"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.let.set()
    await settled()
    assert disk.held == ["side1+side2"], "the other one is still expected"
    async with fetching.fetched(1, ["side2"]):
        assert found(fetching, "side2") == b"side2"
    assert disk.held == []
    expected.close()


async def _have(fetching: Fetching, uid: str) -> None:
    async with fetching.fetched(1, [uid]):
        pytest.fail("it was given up")


async def test_what_cannot_be_expected_leaves_nothing(disk: Disk, fetching: Fetching) -> None:
    disk.find_error = RuntimeError("can't start new thread")
    with pytest.raises(RuntimeError, match="thread"):
        Expected(fetching, 1, [("a", MEBI), ("b", MEBI)])


async def test_a_lease_of_what_is_not_large_after_all_keeps_nobody_waiting(
    disk: Disk, fetching: Fetching
) -> None:
    """Such as what a store has of the time before a limit was lowered."""
    expected = Expected(fetching, 1, [(f"small{number}", MEBI) for number in range(10_000)])
    assert disk.num_found <= 64
    async with fetching.fetched(1, ["small5", "a"]):
        assert disk.read == ["a"]
    expected.close()


@pytest.mark.parametrize("order", ["gacfbhie", "gabcefhi"])
async def test_payloads_are_asked_for_in_any_order(
    disk: Disk, fetching: Fetching, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(module, "_MOST_AHEAD_BYTES", 8 * MEBI)
    monkeypatch.setattr(module, "MOST_AT_ONCE_BYTES", 2 * MEBI)
    expected = Expected(fetching, 1, [(uid, MEBI) for uid in "abcefghi"])
    for uid in order:
        async with fetching.fetched(1, [uid]):
            assert found(fetching, uid) == uid.encode()
    assert sorted(disk.read) == list("abcefghi"), "each of them once"
    expected.close()
