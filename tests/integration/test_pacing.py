"""Admission of new tasks: a worker starts only what the trainer can still use in time."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import (
    BufferConfig,
    Client,
    ConsumerConfig,
    InvalidRequestError,
    Pacing,
    ResourceExhaustedError,
)
from tests.integration.buffers import create, stats, trainer
from tests.integration.plain import error_of, experience, groups, push
from tests.integration.server import Stub, eventually


def paced(client: Client, name: str, **pacing: Any) -> None:
    """A buffer of groups of two; its trainer consumes two per version, one version behind at most."""
    plan: dict[str, Any] = {"consumer": "trainer", "max_staleness": 1, "batch_size": 2} | pacing
    critic = ConsumerConfig("critic", "group")
    create(client, name, 2, others=(critic,), pacing=Pacing(**plan))


def keys(*tasks: int) -> list[str]:
    """The keys of tasks' groups."""
    return [f"7/{task}" for task in tasks]


def test_as_many_tasks_begin_as_can_be_used_in_time(client: Client, name: str) -> None:
    """AReaL's formula, (max_staleness + 1) * batch_size: here 4 groups, whatever they are doing."""
    paced(client, name)
    first = client.reserve_groups(keys(0, 1, 2), buffer=name)
    assert (first.granted, first.reason, first.retry_delay_seconds) == (tuple(keys(0, 1, 2)), "", 0)
    second = client.reserve_groups(keys(2, 3, 4, 5), buffer=name)
    assert second.granted == tuple(keys(2, 3)), "2 has its place already"
    assert "0 are stored and not consumed by 'trainer', 4 are reserved" in second.reason
    assert "at most 4 can be used in time" in second.reason
    assert second.retry_delay_seconds > 0
    assert stats(client, name).num_reserved_groups == 4
    assert "at most 4" in trainer(client, name).pushes_wait_for
    client.push(groups(4, 2), buffer=name)
    assert stats(client, name).num_reserved_groups == 0
    assert not client.reserve_groups(keys(4), buffer=name).granted, "stored ones count as well"
    batch = client.sample(2, buffer=name)
    assert not client.reserve_groups(keys(4), buffer=name).granted, "and leased ones"
    batch.ack()
    assert client.reserve_groups(keys(4, 5, 6), buffer=name).granted == tuple(keys(4, 5))
    assert stats(client, name).num_items == 8, "the critic hasn't seen them: it doesn't count"


def test_a_push_without_a_place_needs_room_too(client: Client, stub: Stub, name: str) -> None:
    paced(client, name)
    client.reserve_groups(keys(0), buffer=name)
    for task in (1, 2, 3):
        client.push([experience(task, 0)], buffer=name)
    code, text, details = error_of(lambda: push(stub, name, [experience(4, 0)]))
    assert code == "RESOURCE_EXHAUSTED"
    assert "admits 0 more groups, this push begins 1" in text
    assert "3 are stored and not consumed by 'trainer', 1 are reserved" in text
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
    for task in (0, 1, 2, 3):
        client.push([experience(task, 1)], buffer=name)
    client.push([experience(0, 0)], buffer=name)
    assert client.sample(4, buffer=name).num_units == 4


def test_places_that_nothing_was_pushed_for_are_free_again(client: Client, name: str) -> None:
    """A worker that died holds no place for good; one that aborts gives its place back at once."""
    paced(client, name)
    client.reserve_groups(keys(0, 1), buffer=name, ttl_seconds=1.0)
    client.reserve_groups(keys(2, 3), buffer=name)
    assert not client.reserve_groups(keys(4), buffer=name).granted
    eventually(lambda: stats(client, name).num_reserved_groups == 2, "places to expire")
    assert client.reserve_groups(keys(4), buffer=name).granted == tuple(keys(4))
    client.drop_group("7/2", buffer=name, reason="environment died")
    assert stats(client, name).num_reserved_groups == 2
    assert client.reserve_groups(keys(5, 6), buffer=name).granted == tuple(keys(5, 6))


def test_a_worker_that_comes_late_still_needs_room(client: Client, name: str) -> None:
    paced(client, name, max_staleness=0, batch_size=1)
    client.reserve_groups(keys(0), buffer=name, ttl_seconds=0.05)
    eventually(lambda: client.reserve_groups(keys(1), buffer=name).granted, "the place to expire")
    with pytest.raises(ResourceExhaustedError, match="admits 0 more groups"):
        client.push([experience(0, 0)], buffer=name, timeout=0.1)


def test_no_more_run_at_once_than_set(client: Client, name: str) -> None:
    paced(client, name, max_running=2)
    assert client.reserve_groups(keys(0, 1, 2), buffer=name).granted == tuple(keys(0, 1))
    client.push([experience(0, 0)], buffer=name)
    assert client.reserve_groups(keys(2, 3), buffer=name).granted == tuple(keys(2))


@pytest.mark.parametrize("group_by", ["task", "none"])
def test_admitted_tasks_may_push_all_of_their_items(
    client: Client, name: str, group_by: Any
) -> None:
    """Where every place is reserved, those who hold them must get through, item by item."""
    client.create_buffer(
        BufferConfig(
            name,
            group_by=group_by,
            group_size=2 if group_by == "task" else 0,
            consumers=(ConsumerConfig("trainer", "item"),),
            pacing=Pacing(consumer="trainer", max_staleness=0, batch_size=2),
        )
    )
    assert client.reserve_groups(keys(0, 1, 2), buffer=name).granted == tuple(keys(0, 1))
    for task in (0, 1):
        client.push([experience(task, 0)], buffer=name)
    assert stats(client, name).num_reserved_groups == 0
    assert not client.reserve_groups(keys(2), buffer=name).granted
    if group_by == "task":
        client.push([experience(0, 1), experience(1, 1)], buffer=name)
    with pytest.raises(ResourceExhaustedError, match="admits 0 more items, this push begins 1"):
        client.push([experience(2, 0)], buffer=name, timeout=0.1)
    client.sample(4, buffer=name, min_batch_size=2, timeout=0).ack()
    client.push([experience(2, 0)], buffer=name)


def test_without_pacing_everything_may_begin(client: Client, name: str) -> None:
    client.create_buffer(BufferConfig(name, group_size=2))
    many = [f"7/{task}" for task in range(50)]
    assert client.reserve_groups(many, buffer=name).granted == tuple(many)


def test_pacing_can_be_tuned_and_ended_live(client: Client, name: str) -> None:
    paced(client, name)
    client.reserve_groups(keys(0, 1, 2, 3), buffer=name)
    client.update_buffer(name, pacing=Pacing(consumer="trainer", max_staleness=2, batch_size=2))
    assert client.reserve_groups(keys(4, 5, 6), buffer=name).granted == tuple(keys(4, 5))
    client.update_buffer(name, pacing=None)
    assert client.reserve_groups(keys(6, 7), buffer=name).granted == tuple(keys(6, 7))


@pytest.mark.parametrize(
    ("groups", "ttl_seconds", "complaint"),
    [
        ([""], 1.0, "empty"),
        ([f"7/{n}" for n in range(10_001)], 1.0, "the limit is 10000"),
        (["7/0"], -1.0, "ttl_seconds"),
    ],
)
def test_bad_reservations_name_what_is_wrong(
    client: Client, name: str, groups: list[str], ttl_seconds: float, complaint: str
) -> None:
    paced(client, name)
    with pytest.raises(InvalidRequestError, match=complaint):
        client.reserve_groups(groups, buffer=name, ttl_seconds=ttl_seconds)
