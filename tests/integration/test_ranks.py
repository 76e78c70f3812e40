"""Ranks of one consumer: disjoint parts of one jointly leased batch, over calls and streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from experience_buffer import (
    Batch,
    Client,
    Experience,
    InvalidRequestError,
    WrongStateError,
)
from experience_buffer.v1 import types_pb2
from tests.integration.buffers import create, stats, trainer
from tests.integration.plain import error_of, experience, groups, sample
from tests.integration.server import Server, Stub, eventually
from tests.integration.streams import speaking


def long_group(task: int, num_tokens: int) -> list[Experience]:
    """A group whose members have so many response tokens together."""
    halves = (num_tokens // 2, num_tokens - num_tokens // 2)
    return [
        experience(
            task,
            run,
            tokens=torch.zeros(2 + half, dtype=torch.int32),
            logprobs=torch.zeros(half),
        )
        for run, half in enumerate(halves)
    ]


def tokens(batch: Batch) -> int:
    """Response tokens of a batch."""
    return sum(len(one.tokens) - one.prompt_length for one in batch.experiences)


def part(client: Client, name: str, rank: int, size: int, world: int, **rest: Any) -> Batch:
    """One rank's part of a batch of `size` groups."""
    return client.sample(size, buffer=name, rank=rank, world_size=world, **rest)


@pytest.mark.parametrize("world", [2, 3])
def test_parts_are_disjoint_whole_and_balanced(client: Client, name: str, world: int) -> None:
    create(client, name, 2)
    lengths = [40, 4, 30, 12, 22, 18]
    client.push([one for task in range(6) for one in long_group(task, lengths[task])], buffer=name)
    parts = [part(client, name, rank, 6, world) for rank in range(world)]
    assert len({one.lease_id for one in parts}) == 1, "one lease"
    assert [(one.rank, one.world_size) for one in parts] == [(r, world) for r in range(world)]
    assert [one.num_units for one in parts] == [6 // world] * world
    groups = [set(one.groups) for one in parts]
    assert set.union(*groups) == {f"7/{task}" for task in range(6)}
    assert sum(len(one) for one in groups) == 6, "a group is with one rank"
    assert all(len(one) == 2 * one.num_units for one in parts), "as a whole"
    sums = [tokens(one) for one in parts]
    assert max(sums) - min(sums) <= 4, f"{sums} of {sum(lengths)} tokens"


def test_a_batch_ends_when_all_ranks_have_acked(client: Client, name: str) -> None:
    create(client, name, 2)
    client.push(groups(4, 2), buffer=name)
    first, second = (part(client, name, rank, 2, 2) for rank in (0, 1))
    assert first.ack() == 1, "one rank is left"
    assert first.ack() == 1, "again"
    assert stats(client, name).num_items == 8
    assert second.ack() == 0
    assert stats(client, name).num_items == 4
    with pytest.raises(InvalidRequestError, match="rank"):
        client.ack(part(client, name, 0, 2, 2).lease_id, buffer=name)


def test_ranks_that_wait_together_get_one_batch(client: Client, name: str) -> None:
    create(client, name, 2)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(part, client, name, rank, 3, 3, timeout=40) for rank in range(3)]
        eventually(lambda: trainer(client, name).num_waiting, "a rank to wait")
        client.push(groups(3, 2), buffer=name)
        parts = [one.result() for one in waiting]
    assert len({one.lease_id for one in parts}) == 1
    assert {key for one in parts for key in one.groups} == {"7/0", "7/1", "7/2"}


def test_a_rank_that_comes_back_gets_the_same_part_again(
    shared_server: Server, client: Client, name: str
) -> None:
    """A rank that crashed and asks anew must train on what the others count on it for."""
    create(client, name, 2)
    client.push(groups(8, 2), buffer=name)
    parts = [part(client, name, rank, 4, 2) for rank in (0, 1)]
    following = part(client, name, 1, 4, 2)
    with Client(shared_server.address) as back:
        again = part(back, name, 1, 4, 2)
        assert (again.lease_id, again.uids) == (parts[1].lease_id, parts[1].uids)
        assert part(back, name, 1, 4, 2).uids == following.uids
    parts[1].ack()
    with Client(shared_server.address) as back:
        assert part(back, name, 1, 4, 2).uids == following.uids, "its first part is done"
        assert part(back, name, 0, 4, 2).uids == parts[0].uids


def test_another_world_size_is_refused_while_a_batch_is_open(client: Client, name: str) -> None:
    create(client, name, 2)
    client.push(groups(4, 2), buffer=name)
    first = part(client, name, 0, 2, 2)
    with pytest.raises(WrongStateError, match="shared by 2 ranks, this call says 4"):
        part(client, name, 3, 2, 4)
    first.nack()
    assert part(client, name, 3, 4, 4).world_size == 4


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (0, 0), (0, 65_537)])
def test_a_rank_must_be_one_of_its_world(
    stub: Stub, client: Client, name: str, rank: int, world: int
) -> None:
    create(client, name, 2)
    rank_of = types_pb2.RankOf(rank=rank, world_size=world)
    code, text, _ = error_of(lambda: sample(stub, name, 2, rank_of=rank_of))
    assert code == "INVALID_ARGUMENT"
    assert f"rank {rank} of {world}" in text


def test_streams_deliver_parts_and_leave_them_when_they_end(
    client: Client, stub: Stub, name: str
) -> None:
    create(client, name, 2)
    client.push(groups(4, 2), buffer=name)

    def rank_of(rank: int) -> types_pb2.RankOf:
        return types_pb2.RankOf(rank=rank, world_size=2)

    with speaking(stub) as zero, speaking(stub) as one:
        zero.open(name, 2, credits=2, rank_of=rank_of(0))
        one.open(name, 2, credits=1, rank_of=rank_of(1))
        mine = [zero.batch(), zero.batch()]
        theirs = one.batch()
        assert theirs.lease == mine[0].lease
        assert theirs.frames[0].lease.world_size == 2
        assert not set(theirs.uids) & set(mine[0].uids)
        assert zero.ack(mine[0].lease) is None
    # Rank 1 died with its stream. The shared leases stay: others hold them, too.
    assert trainer(client, name).num_leases == 2
    with speaking(stub) as back:
        back.open(name, 2, credits=1, rank_of=rank_of(1))
        again = back.batch()
        assert (again.lease, again.uids) == (theirs.lease, theirs.uids)
        assert back.ack(again.lease) is None
        assert stats(client, name).num_items == 4


def test_the_clients_streams_share_batches(client: Client, name: str) -> None:
    create(client, name, 2)
    client.push(groups(8, 2), buffer=name)

    def train(rank: int) -> list[tuple[int, tuple[str, ...]]]:
        seen = []
        with client.stream(2, buffer=name, rank=rank, world_size=2) as stream:
            for step in range(4):
                batch = next(stream)
                seen.append((batch.lease_id, batch.uids))
                batch.ack(step=step)
        return seen

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, (0, 1))
    assert [lease for lease, _ in first] == [lease for lease, _ in second]
    uids = [uid for _, part in (*first, *second) for uid in part]
    assert len(uids) == len(set(uids)) == 16
