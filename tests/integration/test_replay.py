"""Experiences that are delivered several times, on purpose."""

from __future__ import annotations

from collections import Counter

from experience_buffer import (
    Client,
)
from tests.integration.buffers import create
from tests.integration.plain import group


def test_a_group_comes_as_often_as_asked_and_is_gone(client: Client, name: str) -> None:
    create(client, name, 2, replay=True, max_times_sampled=3)
    client.push([*group(0, 2), *group(1, 2)], buffer=name)
    delivered: Counter[str] = Counter()
    for time in range(3):
        batch = client.sample(2, buffer=name)
        assert batch.times_sampled == (time,) * 4
        assert batch.num_deliveries == (1,) * 4, "counted since the last ack"
        delivered.update(batch.uids)
        batch.ack()
    assert set(delivered.values()) == {3}
    assert client.get_buffer(name).num_items == 0
    repeated = client.push(group(0, 2), buffer=name)
    assert repeated.num_duplicates == 2, "what was consumed is remembered"
    assert not client.sample(1, buffer=name, timeout=0)


def test_with_replacement_a_batch_may_repeat_and_an_ack_counts_it_all(
    client: Client, name: str
) -> None:
    options = {"with_replacement": True, "max_times_sampled": 6, "selector": "uniform"}
    create(client, name, 2, replay=True, **options)
    client.push(group(0, 2), buffer=name)
    batch = client.sample(4, buffer=name)
    assert batch.num_units == 4
    assert set(batch.uids) == {one.eid.uid for one in group(0, 2)}
    assert Counter(batch.uids) == dict.fromkeys(set(batch.uids), 4)
    batch.ack()
    last = client.sample(1, buffer=name)
    assert set(last.times_sampled) == {4}
    last.ack()
    final = client.sample(1, buffer=name)
    assert set(final.times_sampled) == {5}
    final.ack()
    assert client.get_buffer(name).num_items == 0
