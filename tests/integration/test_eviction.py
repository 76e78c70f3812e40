"""Full buffers that make room by themselves, and what never leaves that way."""

from __future__ import annotations

from typing import Any

import pytest

from experience_buffer import (
    BufferConfig,
    BufferFullError,
    Client,
    ConsumerConfig,
    Limiter,
    ResourceExhaustedError,
    Selector,
    trxp,
)
from tests.integration.plain import experience, group, summaries
from tests.integration.server import Stub


def evicting(name: str, remover: Any = "fifo", **config: Any) -> BufferConfig:
    """A buffer of at most six experiences, in groups of two unless told otherwise."""
    fields: dict[str, Any] = {"group_size": 2, "max_items": 6}
    consumers = (
        ConsumerConfig("trainer", config.pop("unit", "group"), **config.pop("trainer", {})),
    )
    return BufferConfig(
        name, on_full="evict", remover=remover, consumers=consumers, **(fields | config)
    )


def stored(stub: Stub, name: str) -> list[str]:
    """Task and run of all that is stored, oldest first."""
    return ["/".join(one.uid.split("/")[1:3]) for one in summaries(stub, name)]


def tasks(stub: Stub, name: str) -> list[str]:
    """The tasks of all that is stored, oldest first."""
    return list(dict.fromkeys(one.split("/")[0] for one in stored(stub, name)))


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
    client: Client, stub: Stub, name: str, remover: Any, left: list[str]
) -> None:
    client.create_buffer(evicting(name, remover))
    for task, (reward, priority) in enumerate(((5.0, 9.0), (-3.0, 1.0), (2.0, 1.0), (0.0, 1.0))):
        info = {"priority": priority, "version_start": task}
        client.push(group(task, 2, reward=reward, info=info), buffer=name)
    assert tasks(stub, name) == left
    assert len(stored(stub, name)) == 6, "a group leaves as a whole"
    assert client.sample(3, buffer=name).num_units == 3


def test_leased_and_open_groups_stay(client: Client, stub: Stub, name: str) -> None:
    client.create_buffer(evicting(name))
    client.push([*group(0, 2), *group(1, 2), experience(2, 0)], buffer=name)
    leased = client.sample(1, buffer=name)
    client.push(group(3, 2), buffer=name)
    assert tasks(stub, name) == ["0", "2", "3"], "0 is leased, 2 is open"
    client.push([experience(2, 1)], buffer=name)
    assert tasks(stub, name) == ["0", "2", "3"]
    second = client.sample(2, buffer=name)
    with pytest.raises(BufferFullError, match="max_items = 6"):
        client.push(group(4, 2), buffer=name, timeout=0.1)
    leased.nack()
    client.push(group(4, 2), buffer=name)
    assert tasks(stub, name) == ["2", "3", "4"]
    second.ack()
    assert tasks(stub, name) == ["4"]


def test_what_is_kept_for_a_rewind_stays(client: Client, stub: Stub, name: str) -> None:
    client.create_buffer(evicting(name))
    client.push([one for task in range(3) for one in group(task, 2)], buffer=name)
    client.sample(2, buffer=name).ack(step=4)
    client.push(group(3, 2), buffer=name)
    assert tasks(stub, name) == ["0", "1", "3"]
    client.sample(1, buffer=name).ack(step=5)
    with pytest.raises(BufferFullError, match=r"declare a step safe .6 are kept for a rewind"):
        client.push(group(4, 2), buffer=name, timeout=0.1)
    client.declare_safe(4, buffer=name)
    client.push(group(4, 2), buffer=name)
    assert tasks(stub, name) == ["3", "4"]


def test_bytes_make_room_too(client: Client, stub: Stub, name: str) -> None:
    size = len(trxp.encode([experience(0, 0)]))
    client.create_buffer(
        evicting(
            name, unit="item", group_by="none", group_size=0, max_items=0, max_bytes=3 * size + 9
        )
    )
    for run in range(5):
        client.push([experience(0, run)], buffer=name)
    assert stored(stub, name) == ["0/2", "0/3", "0/4"]
    with pytest.raises(BufferFullError, match="split the push, or raise max_bytes"):
        client.push(group(1, 4), buffer=name, timeout=0.1)


def test_what_was_evicted_is_refunded_to_the_limiter(client: Client, stub: Stub, name: str) -> None:
    """Nobody has to make up for samples of what is gone: neither side waits for it."""
    queue = {"limiter": Limiter(min_diff=0.0, max_diff=6.0)}
    client.create_buffer(
        evicting(name, unit="item", group_by="none", group_size=0, max_items=4, trainer=queue)
    )
    for run in range(20):
        client.push([experience(0, run)], buffer=name)
    assert stored(stub, name) == ["0/16", "0/17", "0/18", "0/19"]
    held = client.sample(4, buffer=name)
    assert len(held) == 4
    with pytest.raises(ResourceExhaustedError):
        client.push([experience(1, 0)], buffer=name, timeout=0.1)
    held.ack()
    for run in range(6):
        client.push([experience(1, run)], buffer=name)
    assert len(client.sample(4, buffer=name)) == 4


def test_an_evicted_experience_is_remembered(client: Client, stub: Stub, name: str) -> None:
    """A worker that pushes again after a lost answer doesn't bring back what was evicted."""
    client.create_buffer(evicting(name))
    for task in range(4):
        client.push(group(task, 2), buffer=name)
    assert client.push(group(0, 2), buffer=name).num_duplicates == 2
    assert tasks(stub, name) == ["1", "2", "3"]


def test_by_default_a_full_buffer_refuses_and_keeps_everything(
    client: Client, stub: Stub, name: str
) -> None:
    client.create_buffer(
        BufferConfig(
            name, group_size=2, max_items=4, consumers=(ConsumerConfig("trainer", "group"),)
        )
    )
    client.push([*group(0, 2), *group(1, 2)], buffer=name)
    with pytest.raises(BufferFullError, match=r"4 \+ 2 exceed max_items = 4"):
        client.push(group(2, 2), buffer=name, timeout=0.1)
    assert tasks(stub, name) == ["0", "1"]
    client.update_buffer(name, on_full="evict", remover="lifo")
    client.push(group(2, 2), buffer=name)
    assert tasks(stub, name) == ["0", "2"], "what was there before can leave, too"
