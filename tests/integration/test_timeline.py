"""The training timeline: acks with steps, what is retained, rewinding, declaring safe."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from experience_buffer import (
    Batch,
    Client,
    LeaseNotFoundError,
    WrongStateError,
)
from tests.integration.buffers import create, states, stats, trainer
from tests.integration.plain import groups


def training(client: Client, name: str, num_tasks: int) -> None:
    """A buffer of groups of two that are all there already."""
    create(client, name, 2)
    client.push(groups(num_tasks, 2), buffer=name)


def step(client: Client, name: str, number: int | None) -> str:
    """Train on the next group; its key."""
    batch = client.sample(1, buffer=name)
    batch.ack(step=number)
    return batch.groups[0]


def keys(*tasks: int) -> list[str]:
    """The keys of tasks' groups."""
    return [f"7/{task}" for task in tasks]


def test_a_rewind_brings_back_what_came_after_its_step(client: Client, name: str) -> None:
    training(client, name, 5)
    assert [step(client, name, number) for number in range(4)] == keys(0, 1, 2, 3)
    assert states(client, name) == ["retained"] * 8 + ["ready"] * 2
    consumer = trainer(client, name)
    assert (consumer.last_step, consumer.num_retained_experiences) == (3, 8)
    held = client.sample(1, buffer=name)
    assert held.groups[0] == "7/4"
    result = client.rewind(1, buffer=name)
    assert (result.num_experiences, result.num_leases) == (4, 1)
    with pytest.raises(LeaseNotFoundError):
        held.ack(step=4)
    again = [step(client, name, number) for number in (2, 3, 4)]
    assert again == keys(2, 3, 4), "each in its old place, what was leased too"
    assert client.rewind(4, buffer=name).num_experiences == 0, "nothing comes after step 4"
    assert not client.sample(1, buffer=name, timeout=0)


def test_what_is_safe_leaves_and_is_not_rewound(client: Client, name: str) -> None:
    training(client, name, 4)
    for number in range(4):
        step(client, name, number)
    result = client.declare_safe(1, buffer=name)
    assert (result.num_experiences, result.safe_step) == (4, 1)
    assert stats(client, name).num_items == 4
    assert client.declare_safe(0, buffer=name).safe_step == 1, "what is safe stays so"
    with pytest.raises(
        WrongStateError, match="can't be rewound to training step 0: step 1 was declared"
    ):
        client.rewind(0, buffer=name)
    assert client.rewind(1, buffer=name).num_experiences == 4
    assert [step(client, name, number) for number in (2, 3)] == keys(2, 3)
    client.declare_safe(3, buffer=name)
    assert stats(client, name).num_items == 0


def test_a_batch_that_is_rewound_on_its_way_is_none_and_says_so(client: Client, name: str) -> None:
    """A rewind may come between the lease of a batch and its sending: nobody gets an empty one."""
    training(client, name, 20)
    stop = threading.Event()

    def rewind() -> None:
        while not stop.is_set():
            client.rewind(-1, buffer=name)

    with ThreadPoolExecutor(1) as pool:
        rewinding = pool.submit(rewind)
        try:
            batches: list[Batch] = []
            while len(batches) < 60 and not rewinding.done():
                batches.append(client.sample(2, buffer=name, timeout=5))
        finally:
            stop.set()
        rewinding.result()
    for batch in batches:
        assert batch or "rewound" in batch.shortfall, batch
        assert bool(batch) == bool(batch.lease_id) == bool(len(batch))
        if batch:  # the last ones may have been leased after the last rewind
            with suppress(LeaseNotFoundError):
                batch.nack()
    assert client.sample(20, buffer=name).num_units == 20
