from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from experience_buffer_server.store.interface import BufferRow, StoreFailedError, StoreFormatError
from experience_buffer_server.store.lmdb import writer_link
from experience_buffer_server.store.lmdb.disk.format import FORMAT_KEY, FORMAT_VERSION, MAGIC
from experience_buffer_server.store.lmdb.disk.opening import open_to_read
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.faults.shim import Faults
from tests.unit.store.conftest import (
    MEBI,
    OpenStore,
    append,
    committing,
    make_record,
    writer_pid,
)


async def test_a_second_owner_is_told_who_has_the_directory(
    open_store: OpenStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A writer names its parent, which is the owner where nothing forks it.
    monkeypatch.setattr(writer_link, "subprocess", subprocess)
    store = await open_store()
    with pytest.raises(StoreFailedError, match=f"{path}.*pid {os.getpid()}, .*{writer_pid(path)}"):
        await open_store(lock_timeout_seconds=0.1)
    await append(store, make_record(1))


async def test_a_new_owner_waits_for_the_last_writer(open_store: OpenStore, path: Path) -> None:
    first = await open_store()
    opening = asyncio.ensure_future(open_store())
    await first.close()
    second = await opening
    assert writer_pid(path) != 0
    assert not second.failed.is_set()


async def test_another_format_version_is_refused(open_store: OpenStore, path: Path) -> None:
    await (await open_store()).close()
    with lmdb.open(str(path), max_dbs=16) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, MAGIC + b"997", db=meta)
    with pytest.raises(
        StoreFormatError, match=f"version 997, this server reads version {FORMAT_VERSION}"
    ):
        await open_store()
    with pytest.raises(StoreFormatError, match="version 997"):
        LmdbReader(path)


@pytest.mark.parametrize("is_database", [True, False])
async def test_a_foreign_file_is_refused_and_left_as_it_is(
    open_store: OpenStore, path: Path, is_database: bool
) -> None:
    path.mkdir(parents=True)
    file, text = path / "data.mdb", r"data\.mdb is not an LMDB database"
    if is_database:
        text = "not an experience buffer store"
        with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
            txn.put(b"foreign", b"value")
    else:
        file.write_bytes(b"something else" * 1000)
    before = file.read_bytes()
    with pytest.raises(StoreFormatError, match=text):
        await open_store()
    with pytest.raises(StoreFormatError, match=text):
        LmdbReader(path)
    assert file.read_bytes() == before


async def test_a_directory_that_cannot_be_made_is_named(
    open_store: OpenStore, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailedError, match="file/store"):
        await open_store(at=tmp_path / "file" / "store")


async def test_the_writer_outlives_signals_to_the_group(open_store: OpenStore, path: Path) -> None:
    store = await open_store()
    assert os.getpgid(writer_pid(path)) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(writer_pid(path), number)
    await append(store, make_record(1))


async def test_the_backlog_hears_how_long_commits_wait_for_the_disk(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store()
    heard: list[float] = []
    monkeypatch.setattr(store.backlog, "committed", heard.append)
    for seq in (1, 2):
        await append(store, make_record(seq))
    assert len(heard) == 2
    assert all(seconds > 0 for seconds in heard)
    assert sum(heard) == pytest.approx(store.stats.commit_seconds)


async def test_the_writers_death_fails_what_is_pending_and_what_follows(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store()
    os.kill(writer_pid(path), signal.SIGSTOP)
    pending = asyncio.ensure_future(append(store, make_record(1)))
    await asyncio.sleep(0)
    assert store.backlog.num_bytes > 0
    os.kill(writer_pid(path), signal.SIGKILL)
    with pytest.raises(StoreFailedError, match="restart"):
        await pending
    await store.failed.wait()
    assert store.backlog.num_bytes == 0
    with pytest.raises(StoreFailedError, match="restart"):
        await append(store, make_record(2))
    await store.close()
    await (await open_store()).close()


@pytest.mark.parametrize("num_answered", [0, 1, 7])
async def test_after_the_writers_death_a_commits_number_says_whether_it_is_stored(
    open_store: OpenStore, num_answered: int
) -> None:
    store = await open_store()
    async with committing(store) as batch:
        batch.put_buffer(
            BufferRow(id=1, name="b", config="{}", policy_version=None, create_time=0.0)
        )
    await store.claim(1)
    commits = []
    for seq in range(1, 200):
        batch = store.batch()
        batch.append(1, make_record(seq), bytes(5000))
        commits.append(asyncio.ensure_future(store.commit(batch)))
        assert batch.numbers == {1: seq}
    if num_answered:
        await commits[num_answered - 1]
    assert store._process is not None
    store._process.kill()
    results = await asyncio.gather(*commits, return_exceptions=True)
    num_acked = sum(result is None for result in results)
    assert num_answered <= num_acked
    await store.close()
    store = await open_store()
    last = await store.last_number(1)
    assert last >= num_acked
    (found,) = store.load()
    assert [record.seq for record in found.records] == list(range(1, last + 1))


async def test_cancelling_a_waiter_withdraws_nothing(open_store: OpenStore) -> None:
    store = await open_store()
    tasks = [asyncio.ensure_future(append(store, make_record(seq))) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 10
    await store.commit(store.batch())
    assert None not in store.payloads(1, [make_record(seq).uid for seq in range(1, 21)])
    assert store.backlog.num_bytes == 0


async def test_concurrent_commits_share_transactions(open_store: OpenStore) -> None:
    turns: list[int] = []
    store = await open_store(
        on_written=lambda _transactions, batches, _seconds: turns.append(batches)
    )
    await asyncio.gather(*(append(store, make_record(seq)) for seq in range(1, 501)))
    assert store.stats.num_batches == sum(turns) == 500
    assert store.stats.num_transactions < 100
    assert store.stats.num_operations == 1000
    assert store.stats.commit_seconds > 0


async def test_how_full_it_is_is_also_said_when_nothing_comes_any_more(
    open_store: OpenStore,
) -> None:
    told = asyncio.Event()

    def note(num_transactions: int, _batches: int, _seconds: float) -> None:
        if not num_transactions:
            told.set()

    store = await open_store(on_written=note)
    await asyncio.gather(
        *(append(store, make_record(seq), payload=bytes(5000)) for seq in range(1, 501))
    )
    async with asyncio.timeout(30):
        await told.wait()
        # On a busy machine the appends pause for so long that it is told between them, too.
        while store.stats.live_bytes <= 500 * 5000:
            told.clear()
            await told.wait()
    assert store.stats.file_bytes >= store.stats.live_bytes
    await store.close()


async def test_the_map_grows_under_concurrent_reads(open_store: OpenStore) -> None:
    store = await open_store(initial_map_bytes=MEBI // 4)
    acked: list[str] = []

    def read(uids: list[str]) -> None:
        for _ in range(5):
            assert store.payloads(1, uids) == [uid.encode() * 500 for uid in uids]

    for start in range(1, 1001, 20):
        records = [make_record(seq) for seq in range(start, start + 20)]
        await asyncio.gather(
            *(append(store, r, payload=r.uid.encode() * 500) for r in records),
            *(asyncio.to_thread(read, acked[-50:]) for _ in range(2)),
        )
        acked += [record.uid for record in records]
        assert None not in store.payloads(1, acked[-20:])
    assert store.stats.map_bytes >= 8 * MEBI
    assert None not in store.payloads(1, acked)


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process, once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def test_a_reader_in_another_process_follows_a_growing_map(
    open_store: OpenStore, path: Path
) -> None:
    store = await open_store(initial_map_bytes=MEBI // 4)
    child = (
        "import sys; from pathlib import Path\n"
        "from experience_buffer_server.store.lmdb.reader import LmdbReader\n"
        "reader = LmdbReader(Path(sys.argv[1])); print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(len(reader.payloads(1, [line.strip()])[0]), flush=True)\n"
    )
    with started(child, path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seq in range(1, 6):
            await append(store, make_record(seq), payload=bytes(MEBI * seq))
            process.stdin.write(make_record(seq).uid + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{MEBI * seq}\n"
        process.stdin.close()
        assert process.wait() == 0


async def test_a_dead_readers_slot_is_freed_at_the_start(open_store: OpenStore, path: Path) -> None:
    await (await open_store()).close()
    child = (
        "import sys, os, lmdb\n"
        "env = lmdb.open(sys.argv[1], readonly=True, max_dbs=16); txn = env.begin()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    # The one that lives keeps LMDB from starting the table of readers afresh.
    with started(child, path) as alive, started(child, path) as dead:
        dead.kill()
        dead.wait()
        store = await open_store()
        assert store._env is not None
        readers = store._env.readers()
        assert f" {alive.pid} " in readers
        assert f" {dead.pid} " not in readers
        assert alive.stdin is not None
        alive.stdin.close()


async def test_a_store_that_has_failed_says_why_though_more_is_sent(
    open_store: OpenStore, faults: Faults
) -> None:
    store = await open_store()
    faults.fail_syncs(errno.EIO, times=1)
    commits = [asyncio.ensure_future(append(store, make_record(1)))]
    await asyncio.sleep(0)
    assert store._transport is not None
    ended = select.poll()
    ended.register(store._transport.get_extra_info("socket"), select.POLLRDHUP)
    assert ended.poll(20_000), "the writer has sent its last word, which nobody has read yet"
    commits.append(asyncio.ensure_future(append(store, make_record(2))))
    for commit in commits:
        with pytest.raises(StoreFailedError, match="Input/output error"):
            await commit


HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


async def test_a_reader_of_the_same_id_in_another_container_is_told(
    open_store: OpenStore, path: Path
) -> None:
    """LMDB knows readers by their process ids: each locks the byte of its number."""
    await (await open_store()).close()
    with started(HOLD, path / "lock.mdb", os.getpid()) as other:
        with pytest.raises(StoreFailedError, match="the same id reads it, from another container"):
            open_to_read(path)
        other.communicate()
    open_to_read(path)[0].close()
