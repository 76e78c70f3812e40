"""Real damage: bytes of the file are changed while the server is stopped; all others are served."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from typer.testing import CliRunner

from experience_buffer import EID
from experience_buffer.packed import PackedBatch
from experience_buffer.v1 import service_pb2, types_pb2
from experience_buffer_server.commands.cli import application
from experience_buffer_server.store.interface import StoredBuffer
from experience_buffer_server.store.lmdb.disk.format import Table, numbered_key, payload_key
from experience_buffer_server.store.lmdb.reader import LmdbReader
from tests.damaging import flip
from tests.integration.plain import (
    STORED,
    create,
    error_of,
    experience,
    group,
    push,
    sample,
    states,
    stats,
    statuses,
    summaries,
    uids,
)
from tests.integration.server import MakeServer, Server, Stub, eventually
from tests.integration.streams import speaking

FORMATS = {"trxp": types_pb2.SAMPLE_FORMAT_TRXP, "packed": types_pb2.SAMPLE_FORMAT_PACKED}
LARGE = torch.arange(3000)
"""Tokens of a payload that takes pages of its own."""


def uid(task: str, run: int) -> str:
    return EID(batch=7, task=task, run=run, step=0, suffix="c0ffee").uid


def large(task: str, run: int) -> Any:
    return experience(task, run, tokens=LARGE + run, logprobs=torch.zeros(len(LARGE) - 2))


def loaded(server: Server) -> dict[str, StoredBuffer]:
    """The buffers of a stopped server's store, by name."""
    with LmdbReader(server.data) as reader:
        return {state.row.name: state for state in reader.load()}


def verify(server: Server) -> tuple[int, dict[str, Any]]:
    """Exit status and report of the command."""
    result = CliRunner().invoke(application(), ["verify", "--data", str(server.data), "--json"])
    return result.exit_code, json.loads(result.stdout)


def damage_payload(server: Server, name: str, victim: str) -> None:
    flip(server.data, Table.PAYLOADS, payload_key(loaded(server)[name].row.id, victim))


def delivered(stub: Stub, name: str, way: str) -> tuple[list[str], str]:
    """The uids of a batch of up to 8, however it is asked for, and what is said of the others."""
    least = {"min_batch_size": 1, "timeout_seconds": 0.2}
    if way == "stream":
        with speaking(stub) as stream:
            stream.open(name, 8, credits=1, **least)
            received = stream.batch()
            assert not stream.ack(received.lease)
            return received.uids, received.last.shortfall
    if way == "ranks":
        return of_ranks(stub, name, least)
    response = sample(stub, name, 8, format=FORMATS[way], **least)
    found = uids(response)
    if way == "packed":
        found = PackedBatch.parse(response.packed).uids
    assert response.num_units == len(found)
    stub.Ack(service_pb2.AckRequest(buffer=name, lease_id=response.lease.id))
    return list(found), response.shortfall


def of_ranks(stub: Stub, name: str, least: dict[str, Any]) -> tuple[list[str], str]:
    found: list[str] = []
    shortfalls = ""
    for rank in (0, 1):
        asked = types_pb2.RankOf(rank=rank, world_size=2)
        response = sample(stub, name, 8, rank_of=asked, **least)
        found += uids(response)
        shortfalls += response.shortfall
        request = service_pb2.AckRequest(buffer=name, lease_id=response.lease.id, rank=rank)
        stub.Ack(request)
    return found, shortfalls


def test_a_damaged_payload_costs_itself_alone(make_server: MakeServer) -> None:
    server = make_server()
    ways = ("trxp", "packed", "stream", "ranks")
    with server.stub() as stub:
        for way in ways:
            create(stub, way)
            push(stub, way, [large(way, 0), *group(way, 5)[1:]])
    assert server.stop() == 0
    for way in ways:
        damage_payload(server, way, uid(way, 0))
    server.start()
    with server.stub() as stub:
        for way in ways:
            found, shortfall = delivered(stub, way, way)
            assert sorted(found) == [uid(way, run) for run in range(1, 5)], way
            assert "set aside: damaged on the disk" in shortfall
            get = service_pb2.GetRequest(buffer=way, uid=uid(way, 0))
            code, text, _ = error_of(functools.partial(stub.Get, get))
            assert code == "DATA_LOSS"
            assert f"{uid(way, 0)!r} of buffer {way!r} is damaged: payloads" in text
            assert "delete it, or restore the store from a snapshot" in text
            assert stats(stub, way).num_damaged == 1
            (left,) = summaries(stub, way)
            assert left.state == types_pb2.EXPERIENCE_STATE_QUARANTINED
            assert "can't be read back" in left.message
    assert 'experience_buffer_damaged_experiences{buffer="trxp"} 1.0' in server.metrics()
    status, report = verify(server)
    assert (status, report["totals"]) == (1, {"damaged_row": 4, "set_aside": 4})
    assert sum("set aside" in line for line in server.log) == 4
    # A restart knows, without reading it again.
    server.restart()
    with server.stub() as stub:
        assert stats(stub, "stream").num_damaged == 1
        late = sample(stub, "stream", 1, timeout_seconds=0.0)
        assert not late.HasField("lease")
        request = service_pb2.DeleteRequest(buffer="stream", uids=[uid("stream", 0)])
        assert stub.Delete(request).num_deleted == 1
        assert stats(stub, "stream").num_damaged == 0
        assert statuses(push(stub, "stream", [large("stream", 0)])) == [STORED]
    assert sum("set aside" in line for line in server.log) == 4


def test_groups_stay_whole_or_are_set_aside(make_server: MakeServer) -> None:
    """A damaged member, a lost record, a lost group row, a lost lease: each has its own end."""
    server = make_server()
    with server.stub() as stub:
        create(stub, "g", consumers={"trainer": "group", "critic": "item"}, group_size=3)
        for task in ("payload", "record", "row", "sound", "leased"):
            push(stub, "g", [large(task, 0), *group(task, 3)[1:]])
        push(stub, "g", group("open", 2))
        first = sample(stub, "g", 1, lease_seconds=3600.0)
        assert uids(first) == [uid("payload", run) for run in range(3)]
    assert server.stop() == 0
    state = loaded(server)["g"]
    groups = {row.key.removeprefix("7/"): row.id for row in state.groups}
    seqs = {record.uid: record.seq for record in state.records}
    buffer_id = state.row.id
    flip(server.data, Table.PAYLOADS, payload_key(buffer_id, uid("payload", 0)))
    flip(server.data, Table.RECORDS, numbered_key(buffer_id, seqs[uid("record", 1)]))
    flip(server.data, Table.RECORDS, numbered_key(buffer_id, seqs[uid("open", 1)]))
    flip(server.data, Table.GROUPS, numbered_key(buffer_id, groups["row"]))
    flip(server.data, Table.LEASES, numbered_key(buffer_id, first.lease.id))
    server.start()
    with server.stub() as stub:
        # The lease is lost: its group is offered again, and found damaged.
        code, text, _ = error_of(lambda: stub.Ack(ack_request(first.lease.id)))
        assert (code, f"lease {first.lease.id}" in text) == ("NOT_FOUND", True)
        batch = sample(stub, "g", 8, min_batch_size=1, timeout_seconds=0.2)
        assert batch.lease.id > first.lease.id
        assert {one.group for one in batch.experiences} == {"7/sound", "7/leased"}
        assert batch.num_units == 2
        stub.Ack(ack_request(batch.lease.id))
        # Who takes items gets all but what can't be read.
        rest = sample(stub, "g", 32, consumer="critic", min_batch_size=1, timeout_seconds=0.2)
        lost = {uid("payload", 0), uid("record", 1), uid("open", 1)}
        assert set(uids(rest)) == seqs.keys() - lost
        stub.Ack(ack_request(rest.lease.id))
        # The open group waits for its member as for any other, and it can be pushed again.
        assert statuses(push(stub, "g", group("open", 3)[1:])) == [STORED, STORED]
        assert uids(sample(stub, "g", 1)) == [uid("open", run) for run in range(3)]
        assert stats(stub, "g").num_damaged == 1
        gone = service_pb2.DropGroupRequest(buffer="g", group="7/row", reason="lost its row")
        assert stub.DropGroup(gone).num_dropped == 3
        # What is left of a group whose damaged member is deleted is delivered, as ever.
        request = service_pb2.DeleteRequest(buffer="g", uids=[uid("payload", 0)])
        assert stub.Delete(request).num_deleted == 1
        assert uids(sample(stub, "g", 1)) == [uid("payload", 1), uid("payload", 2)]
    assert server.stop() == 0
    status, report = verify(server)
    assert status == 1
    assert report["totals"]["damaged_row"] == 3, "two records and the lease are still there"


def ack_request(lease_id: int, **more: Any) -> service_pb2.AckRequest:
    return service_pb2.AckRequest(buffer="g", lease_id=lease_id, **more)


def test_leases_and_computed_groups_survive_damage(make_server: MakeServer) -> None:
    """A shared lease shrinks for the rank that had the unit; a group that can't be computed waits."""
    server = make_server()
    with server.stub() as stub:
        create(stub, "g")
        push(stub, "g", [large("shared", run) for run in range(4)])
        parts = [
            sample(stub, "g", 4, rank_of=types_pb2.RankOf(rank=rank, world_size=2))
            for rank in (0, 1)
        ]
        stub.Ack(ack_request(parts[0].lease.id, rank=0))
        create(stub, "c", estimator="rloo", group_size=2)
        push(stub, "c", [large("done", 0), large("done", 1)])
        push(stub, "c", [large("late", 0)])
        eventually(lambda: states(stub, "c")[:2] == ["ready", "ready"], "the group's advantages")
    assert server.stop() == 0
    buffers = loaded(server)
    damage_payload(server, "g", uids(parts[1])[0])
    damage_payload(server, "c", uid("late", 0))
    seqs = {record.uid: record.seq for record in buffers["c"].records}
    key = numbered_key(buffers["c"].row.id, seqs[uid("done", 1)])
    flip(server.data, Table.ADVANTAGES, key)
    flip(server.data, Table.MAGNITUDES, numbered_key(buffers["c"].row.id, seqs[uid("done", 0)]))
    server.start()
    with server.stub() as stub:
        part = types_pb2.RankOf(rank=1, world_size=2)
        again = sample(stub, "g", 4, rank_of=part)
        assert (again.lease.id, uids(again)) == (parts[0].lease.id, uids(parts[1])[1:])
        assert stub.Ack(ack_request(again.lease.id, rank=1)).num_waiting_ranks == 0
        assert stats(stub, "g").num_items == 1, "all but the damaged one is consumed"
        batch = sample(stub, "c", 2, min_batch_size=1, timeout_seconds=0.2)
        assert uids(batch) == [uid("done", 0)]
        push(stub, "c", [large("late", 1)])
        eventually(lambda: states(stub, "c")[1:] == ["quarantined"] * 3, "the damage to be found")
        messages = {one.uid: one.message for one in summaries(stub, "c")}
        assert "advantages: buffer" in messages[uid("done", 1)]
        assert f"its member {uid('late', 0)!r}" in messages[uid("late", 1)]
        assert stats(stub, "c").num_damaged == 2
    server.restart()
    with server.stub() as stub:
        assert stats(stub, "c").num_damaged == 2
        request = service_pb2.DeleteRequest(buffer="c", uids=[uid("late", 0)])
        assert stub.Delete(request).num_deleted == 1
        eventually(lambda: states(stub, "c")[-1] == "ready", "the rest of the group")
