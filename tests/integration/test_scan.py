"""Scan: what is stored, as it was pushed, without a consumer and without being in anybody's way."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from experience_buffer import (
    EID,
    AsyncClient,
    Client,
    ClientOptions,
    ConsumerConfig,
    Experience,
    InvalidRequestError,
    ResourceExhaustedError,
    RetryOptions,
    Tombstone,
    trxp,
)
from experience_buffer.errors import BufferNotFoundError
from experience_buffer.scanned import ScannedExperience
from experience_buffer_server.store.lmdb.disk.format import Table, numbered_key, payload_key
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.damaging import flip
from tests.integration.buffers import create, trainer
from tests.integration.server import MakeServer, Server, eventually


def rollout(task: int, run: int, size: int = 3, **fields: object) -> Experience:
    given: dict[str, object] = {
        "eid": EID("b/1", task, run, 0, "s"),
        "prompt": [1, 2],
        "response": [*range(size)],
        "logprobs": [-0.5] * size,
        "reward": float(run),
        "info": {"model_version": task},
    }
    return Experience(**(given | fields))  # type: ignore[arg-type]


def filled(client: Client, name: str, groups: int = 6, **options: object) -> list[bytes]:
    """A buffer whose groups of two have advantages; the payloads that were pushed."""
    create(client, name, 2, advantage="grpo", **options)
    payloads = [rollout(task, run).serialize() for task in range(groups) for run in range(2)]
    for payload in payloads:
        client.push(payload, buffer=name)
    eventually(lambda: trainer(client, name).num_ready_units == groups, "all are computed")
    return payloads


def test_it_brings_payloads_as_they_were_pushed_and_what_was_computed(
    client: Client, name: str
) -> None:
    payloads = filled(client, name)
    found = list(client.scan(buffer=name))
    assert [each.payload for each in found] == payloads
    batch = client.sample(6, buffer=name)
    assert sorted(batch.payloads) == sorted(
        each.experience.serialize() for each in found if each.experience
    )
    first = found[0]
    assert first.summary.group == "b%2F1/0" or first.summary.group == first.summary.tid
    assert first.computation is not None
    assert first.computation["estimator"] == "grpo"
    assert np.frombuffer(first.advantages, np.float32) == pytest.approx([-1.0] * 3, abs=0.3)
    assert first.returns == first.advantages
    listed = {each.uid: each for each in client.list(buffer=name)}
    again = list(client.scan(buffer=name))
    assert {each.summary.state for each in again} == {"leased"}
    for each in again:
        theirs, ours = listed[each.summary.uid].to_dict(), each.summary.to_dict()
        assert {**theirs, "places": []} == {**ours, "places": []}
    batch.ack(step=3)
    assert [each.times_sampled for each in client.scan(buffer=name)] == [1] * 12


def test_nothing_is_consumed_by_it_and_nobody_is_needed_for_it(client: Client, name: str) -> None:
    filled(client, name)
    before = trainer(client, name)
    list(client.scan(buffer=name))
    assert trainer(client, name) == before


def test_it_goes_on_after_any_experience_and_after_an_earlier_scan(
    client: Client, name: str
) -> None:
    payloads = filled(client, name)
    with client.scan(buffer=name) as scan:
        first = [next(scan) for _ in range(5)]
    rest = client.scan(buffer=name, cursor=scan.cursor)
    assert [each.payload for each in [*first, *rest]] == payloads
    assert scan.cursor == first[-1].cursor
    assert rest.progress == 1.0
    assert list(client.scan(buffer=name, cursor=rest.cursor)) == []
    client.push([rollout(99, 0)], buffer=name)
    (new,) = client.scan(buffer=name, cursor=rest.cursor)
    assert new.summary.uid == rollout(99, 0).eid.uid
    assert new.summary.state == "waiting_for_group"


def test_a_cursor_of_another_buffer_is_refused(client: Client, name: str) -> None:
    filled(client, name)
    scan = client.scan(buffer=name)
    list(scan)
    client.delete_buffer(name, force=True)
    with pytest.raises(BufferNotFoundError):
        list(client.scan(buffer=name))
    filled(client, name)
    with pytest.raises(InvalidRequestError, match="which was deleted since"):
        list(client.scan(buffer=name, cursor=scan.cursor))
    with pytest.raises(InvalidRequestError, match="not one that a scan gave"):
        list(client.scan(buffer=name, cursor="7"))
    with pytest.raises(InvalidRequestError):
        client.scan(buffer=name, colour="red")  # type: ignore[call-arg]


def test_what_is_pushed_meanwhile_isnt_among_it_so_it_ends(client: Client, name: str) -> None:
    create(client, name)
    size = 60_000  # Of which few go into one frame.
    client.push([rollout(0, run, size) for run in range(20)], buffer=name)
    uids = []
    for each in client.scan(buffer=name):
        uids.append(each.summary.uid)
        client.push([rollout(1, len(uids), 1)], buffer=name)
    assert uids == [rollout(0, run).eid.uid for run in range(20)]


def test_filters_hold_and_failed_rollouts_are_told_of(client: Client, name: str) -> None:
    filled(client, name)
    client.push([], tombstones=[Tombstone(EID("b/1", 77, 0, 0, "t"), "no memory")], buffer=name)
    some = list(client.scan(buffer=name, tid=rollout(3, 0).eid.tid))
    assert [each.summary.uid for each in some] == [rollout(3, run).eid.uid for run in range(2)]
    (dead,) = client.scan(buffer=name, state="tombstone")
    assert (dead.summary.message, dead.payload, dead.problem) == ("no memory", b"", "")
    assert dead.experience is None
    assert not list(client.scan(buffer=name, tid="b/none"))


def test_without_payloads_it_says_all_else(client: Client, name: str) -> None:
    filled(client, name)
    found = list(client.scan(buffer=name, with_payloads=False))
    assert len(found) == 12
    assert not any(each.payload or each.advantages for each in found)
    assert all(each.details and each.summary.payload_bytes for each in found)


def test_large_and_many_come_whole(client: Client, name: str) -> None:
    create(client, name)
    sizes = [3, 900_000, 5, 20_000, 300_000, *[7] * 3000]
    payloads = [rollout(0, run, size).serialize() for run, size in enumerate(sizes)]
    for start in range(0, len(payloads), 500):
        client.push(trxp.merge(payloads[start : start + 500]), buffer=name)
    assert [each.payload for each in client.scan(buffer=name)] == payloads


async def test_the_async_client_has_it_too(shared_server: Server, name: str) -> None:
    with Client(shared_server.address) as client:
        payloads = filled(client, name)
    async with AsyncClient(shared_server.address) as client:
        async with client.scan(buffer=name) as scan:
            assert [each.payload async for each in scan] == payloads
        scans = [client.scan(buffer=name) for _ in range(3)]
        found = await asyncio.gather(*(anext(scan) for scan in scans))
        assert {each.payload for each in found} == {payloads[0]}
        for scan in scans:
            await scan.close()
            with pytest.raises(StopAsyncIteration):
                await anext(scan)


def test_only_so_many_run_at_once_and_one_that_is_closed_makes_room(
    shared_server: Server, name: str
) -> None:
    options = ClientOptions(retry=RetryOptions(reconnect_seconds=1.0))
    with Client(shared_server.address, options=options) as client:
        create(client, name)
        for run in range(60):
            client.push([rollout(0, run, 200_000)], buffer=name)
        scans = [client.scan(buffer=name) for _ in range(4)]
        for scan in scans:
            next(scan)
        with pytest.raises(ResourceExhaustedError, match="4 scans are running"):
            next(client.scan(buffer=name))
        scans[0].close()
        assert len(list(client.scan(buffer=name))) == 60
        for scan in scans:
            scan.close()


def test_it_goes_on_where_it_was_when_the_server_is_killed(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math")
        for run in range(30):
            client.push([rollout(0, run, 150_000)], buffer="math")
        found: list[ScannedExperience] = []
        for each in client.scan(buffer="math"):
            found.append(each)
            if len(found) == 10:
                server.kill()
                server.start()
    assert [each.summary.uid for each in found] == [rollout(0, run).eid.uid for run in range(30)]


def test_what_is_damaged_is_told_of_and_the_others_come(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        payloads = filled(client, "math")
    server.stop()
    with LmdbReader(server.data) as reader:
        (stored,) = [each for each in reader.load() if each.row.name == "math"]
        seqs = {record.uid: record.seq for record in stored.records}
    victim, other = rollout(2, 1).eid.uid, rollout(4, 0).eid.uid
    flip(server.data, Table.PAYLOADS, payload_key(stored.row.id, victim))
    flip(server.data, Table.ADVANTAGES, numbered_key(stored.row.id, seqs[other]))
    server.start()
    with Client(server.address) as client:
        found = {each.summary.uid: each for each in client.scan(buffer="math")}
        assert "can't be read back" in found[victim].problem
        assert "can't be read back" in found[other].problem
        assert not found[victim].payload
        assert len([each for each in found.values() if each.payload in payloads]) == 10
        # It is set aside, as by whoever reads it.
        eventually(lambda: client.get_stats("math").buffers[0].num_damaged == 2, "are set aside")
        again = {each.summary.uid: each for each in client.scan(buffer="math")}
        assert again[victim].problem


def test_training_goes_on_beside_it(make_server: MakeServer) -> None:
    server = make_server()
    with Client(server.address) as client:
        create(client, "math", others=(ConsumerConfig("never"),))
        for start in range(0, 4000, 500):
            client.push([rollout(start, run, 1000) for run in range(500)], buffer="math")
        stop, num_scans = threading.Event(), 0

        def look() -> None:
            nonlocal num_scans
            while not stop.is_set():
                assert len(list(client.scan(buffer="math"))) == 4000
                num_scans += 1

        thread = threading.Thread(target=look)
        thread.start()
        seconds: list[float] = []
        while num_scans < 3 or len(seconds) < 20:
            began = time.perf_counter()
            client.sample(4, buffer="math", timeout=5.0).ack()
            seconds.append(time.perf_counter() - began)
        stop.set()
        thread.join()
    # Nobody waits for a scan to end.
    assert sorted(seconds)[len(seconds) // 2] < 0.25
