"""Full buffers that make room by themselves, and what never leaves that way."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import (
    BufferFullError,
    Client,
    Limiter,
    ResourceExhaustedError,
    Selector,
    trxp,
)
from tests.integration.buffers import create
from tests.integration.plain import experience, group, groups


def evicting(client: Client, name: str, size: int = 2, **options: Any) -> None:
    """A buffer of at most six experiences, in groups of two, unless told otherwise."""
    create(client, name, size, on_full="evict", **({"max_items": 6} | options))


def stored(client: Client, name: str) -> list[str]:
    """Task and run of all that is stored, oldest first."""
    return ["/".join(one.uid.split("/")[1:3]) for one in client.list(buffer=name)]


def tasks(client: Client, name: str) -> list[str]:
    """The tasks of all that is stored, oldest first."""
    return list(dict.fromkeys(one.split("/")[0] for one in stored(client, name)))


@pytest.mark.parametrize(
    ("remover", "left"),
    [
        ("fifo", ["1", "2", "3"]),
        ("lifo", ["0", "1", "3"]),
        (Selector("min", key="reward"), ["0", "2", "3"]),
        (Selector("max"), ["1", "2", "3"]),
        (Selector("freshest"), ["0", "1", "3"]),
    ],
)
def test_the_remover_chooses_whole_groups(
    client: Client, name: str, remover: Any, left: list[str]
) -> None:
    evicting(client, name, remover=remover)
    for task, (reward, priority) in enumerate(((5.0, 9.0), (-3.0, 1.0), (2.0, 1.0), (0.0, 1.0))):
        info = {"priority": priority, "version_start": task}
        client.push(group(task, 2, reward=reward, info=info), buffer=name)
    assert tasks(client, name) == left
    assert len(stored(client, name)) == 6, "a group leaves as a whole"
    assert client.sample(3, buffer=name).num_units == 3


def test_leased_and_open_groups_stay(client: Client, name: str) -> None:
    evicting(client, name)
    client.push([*group(0, 2), *group(1, 2), experience(2, 0)], buffer=name)
    leased = client.sample(1, buffer=name)
    client.push(group(3, 2), buffer=name)
    assert tasks(client, name) == ["0", "2", "3"], "0 is leased, 2 is open"
    client.push([experience(2, 1)], buffer=name)
    assert tasks(client, name) == ["0", "2", "3"]
    second = client.sample(2, buffer=name)
    with pytest.raises(BufferFullError, match="max_items = 6"):
        client.push(group(4, 2), buffer=name, timeout=0.1)
    leased.nack()
    client.push(group(4, 2), buffer=name)
    assert tasks(client, name) == ["2", "3", "4"]
    second.ack()
    assert tasks(client, name) == ["4"]


def test_what_is_kept_for_a_rewind_stays(client: Client, name: str) -> None:
    evicting(client, name)
    client.push(groups(3, 2), buffer=name)
    client.sample(2, buffer=name).ack(step=4)
    client.push(group(3, 2), buffer=name)
    assert tasks(client, name) == ["0", "1", "3"]
    client.sample(1, buffer=name).ack(step=5)
    with pytest.raises(
        BufferFullError, match=r"declare a training step safe .6 are kept for a rewind"
    ):
        client.push(group(4, 2), buffer=name, timeout=0.1)
    client.declare_safe(4, buffer=name)
    client.push(group(4, 2), buffer=name)
    assert tasks(client, name) == ["3", "4"]


def test_bytes_make_room_too(client: Client, name: str) -> None:
    size = len(trxp.encode([experience(0, 0)]))
    evicting(client, name, 0, max_items=0, max_bytes=3 * size + 9)
    for run in range(5):
        client.push([experience(0, run)], buffer=name)
    assert stored(client, name) == ["0/2", "0/3", "0/4"]
    client.push(group(1, 4), buffer=name)
    assert stored(client, name) == ["1/1", "1/2", "1/3"], "what can't go at once goes in parts"


def test_what_was_evicted_is_refunded_to_the_limiter(client: Client, name: str) -> None:
    """Nobody has to make up for samples of what is gone: neither side waits for it."""
    evicting(client, name, 0, max_items=4, limiter=Limiter(min_diff=0.0, max_diff=6.0))
    for run in range(20):
        client.push([experience(0, run)], buffer=name)
    assert stored(client, name) == ["0/16", "0/17", "0/18", "0/19"]
    held = client.sample(4, buffer=name)
    assert len(held) == 4
    with pytest.raises(ResourceExhaustedError):
        client.push([experience(1, 0)], buffer=name, timeout=0.1)
    held.ack()
    for run in range(6):
        client.push([experience(1, run)], buffer=name)
    assert len(client.sample(4, buffer=name)) == 4


def test_an_evicted_experience_is_remembered(client: Client, name: str) -> None:
    """A worker that pushes again after a lost answer doesn't bring back what was evicted."""
    evicting(client, name)
    for task in range(4):
        client.push(group(task, 2), buffer=name)
    assert client.push(group(0, 2), buffer=name).num_duplicates == 2
    assert tasks(client, name) == ["1", "2", "3"]


def test_by_default_a_full_buffer_refuses_and_keeps_everything(client: Client, name: str) -> None:
    create(client, name, 2, max_items=4)
    client.push([*group(0, 2), *group(1, 2)], buffer=name)
    with pytest.raises(BufferFullError, match=r"4 \+ 2 exceed max_items = 4"):
        client.push(group(2, 2), buffer=name, timeout=0.1)
    assert tasks(client, name) == ["0", "1"]
    client.update_buffer(name, on_full="evict", remover="lifo")
    client.push(group(2, 2), buffer=name)
    assert tasks(client, name) == ["0", "2"], "what was there before can leave, too"
