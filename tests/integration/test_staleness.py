"""Freshness: judged when a batch ships; versions of the future; who watches the version."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from experience_buffer import (
    BufferNotFoundError,
    Client,
    ConsumerConfig,
    Experience,
    PushRefusedError,
    Staleness,
)
from tests.integration.buffers import create, states, trainer
from tests.integration.plain import NUM_RESPONSE, experience
from tests.integration.server import eventually


def of_version(task: int, run: int, version: int, *, until: int | None = None) -> Experience:
    """An experience that one policy version began and another may have ended."""
    versions = torch.full((NUM_RESPONSE,), version)
    versions[NUM_RESPONSE // 2 :] = version if until is None else until
    return experience(task, run, versions=versions)


def runs(batch: Any) -> list[int]:
    """The runs that a batch holds."""
    return [int(uid.split("/")[2]) for uid in batch.uids]


def test_freshness_is_judged_when_the_batch_ships(client: Client, name: str) -> None:
    """prime-rl checks again when the batch ships: fresh when pushed isn't fresh when trained on."""
    create(client, name, staleness=Staleness(max_lag=1))
    client.publish_policy_version(3, buffer=name)
    client.push([of_version(0, run, version) for run, version in enumerate((1, 2, 3))], buffer=name)
    assert states(client, name) == ["ready"] * 3, "admitted whatever their version"
    client.publish_policy_version(4, buffer=name)
    batch = client.sample(3, buffer=name, min_batch_size=1, timeout=0.1)
    assert runs(batch) == [2]
    assert batch.staleness == (1,)
    assert "2 were too stale and left out" in batch.shortfall
    consumer = trainer(client, name)
    assert consumer.num_stale_units == 2
    eventually(lambda: client.get_buffer(name).num_items == 1, "the stale ones to be removed")


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        (Staleness(max_lag=0), [3]),
        (Staleness(max_lag=2), [1, 3, 4]),
        (Staleness(max_version_span=0), [0, 1, 3]),
        (Staleness(max_version_span=3), [0, 1, 2, 3, 4]),
        (Staleness(max_lag=3, max_version_span=1), [1, 3]),
        (Staleness(), [0, 1, 2, 3, 4]),
    ],
)
def test_the_window_is_by_lag_and_by_span(
    client: Client, name: str, staleness: Staleness, expected: list[int]
) -> None:
    create(client, name, staleness=staleness)
    client.publish_policy_version(5, buffer=name)
    client.push(
        [
            of_version(0, 0, 1),
            of_version(0, 1, 3),
            of_version(0, 2, 2, until=4),
            of_version(0, 3, 5),
            of_version(0, 4, 3, until=5),
        ],
        buffer=name,
    )
    batch = client.sample(5, buffer=name, min_batch_size=1, timeout=0)
    assert runs(batch) == expected


def test_what_waited_too_long_is_stale_by_age(client: Client, name: str) -> None:
    create(client, name, staleness=Staleness(max_age_seconds=0.9))
    client.push([of_version(0, 0, 1)], buffer=name)
    old = client.get(of_version(0, 0, 1).eid.uid, buffer=name).summary.push_time

    def is_old() -> bool:
        client.push([of_version(0, 1, 1)], buffer=name)
        new = client.get(of_version(0, 1, 1).eid.uid, buffer=name).summary.push_time
        client.delete(uids=[of_version(0, 1, 1).eid.uid], buffer=name)
        return new - old > 1.0

    eventually(is_old, "the first to grow old")
    client.push([of_version(0, 2, 1)], buffer=name)
    batch = client.sample(2, buffer=name, min_batch_size=1, timeout=0)
    assert runs(batch) == [2]
    assert "1 were too stale" in batch.shortfall


def test_stale_units_are_kept_for_others_or_delivered_marked(client: Client, name: str) -> None:
    """drop removes for all but who holds it; keep passes over for one; mark says so."""
    strict = Staleness(max_lag=0, on_stale="keep")
    marking = ConsumerConfig("marking", staleness=Staleness(max_lag=0, on_stale="mark"))
    any_age = ConsumerConfig("replay")
    create(client, name, staleness=strict, others=(marking, any_age))
    client.push([of_version(0, 0, 1), of_version(0, 1, 2)], buffer=name)
    client.publish_policy_version(2, buffer=name)
    first = client.sample(2, buffer=name, min_batch_size=1, timeout=0)
    assert runs(first) == [1]
    first.ack()
    marked = client.sample(2, buffer=name, consumer="marking")
    assert runs(marked) == [0, 1]
    assert marked.flags == (("stale",), ())
    marked.ack()
    everything = client.sample(2, buffer=name, consumer="replay")
    assert runs(everything) == [0, 1]
    assert everything.staleness == (1, 0)
    everything.ack()
    eventually(lambda: client.get_buffer(name).num_items == 0, "what all have passed to leave")
    assert not client.sample(1, buffer=name, timeout=0)


def test_a_repeated_push_of_a_dropped_one_is_a_duplicate(client: Client, name: str) -> None:
    create(client, name, staleness=Staleness(max_lag=0))
    client.push([of_version(0, 0, 1)], buffer=name)
    client.publish_policy_version(2, buffer=name)
    assert not client.sample(1, buffer=name, timeout=0)
    eventually(lambda: client.get_buffer(name).num_items == 0, "it to leave")
    assert client.push([of_version(0, 0, 1)], buffer=name).num_duplicates == 1


# --- versions newer than the trainer's


def test_versions_of_the_future_are_held_until_they_are_published(
    client: Client, name: str
) -> None:
    """Marin refuses what is newer than the trainer after a rollback; here it waits by default."""
    create(client, name)
    client.publish_policy_version(5, buffer=name)
    client.push([of_version(0, 0, 5), of_version(0, 1, 6), of_version(0, 2, 8)], buffer=name)
    assert states(client, name) == ["ready", "held", "held"]
    first = client.sample(3, buffer=name, min_batch_size=1, timeout=0)
    assert runs(first) == [0]
    assert "2 held until policy version 6 is published" in first.shortfall
    assert trainer(client, name).num_held_units == 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.sample, 1, buffer=name, timeout=40)
        eventually(lambda: trainer(client, name).num_waiting, "the call to wait")
        client.publish_policy_version(7, buffer=name)
        assert runs(waiting.result()) == [1]
    assert states(client, name) == ["leased", "leased", "held"]


def test_a_rollback_holds_what_came_after(client: Client, name: str) -> None:
    """What was ready before the rollback is judged again when the batch ships."""
    create(client, name, staleness=Staleness(max_lag=1))
    client.publish_policy_version(6, buffer=name)
    client.push([of_version(0, run, version) for run, version in enumerate((6, 5, 4))], buffer=name)
    client.publish_policy_version(4, buffer=name)
    batch = client.sample(3, buffer=name, min_batch_size=1, timeout=0)
    assert runs(batch) == [2]
    assert "2 held until policy version 5" in batch.shortfall
    client.publish_policy_version(5, buffer=name)
    assert runs(client.sample(1, buffer=name)) == [1]
    client.publish_policy_version(6, buffer=name)
    assert runs(client.sample(1, buffer=name)) == [0]


def test_versions_of_the_future_are_refused_where_that_is_set(client: Client, name: str) -> None:
    create(client, name, on_future_version="refuse")
    client.push([of_version(0, 0, 9)], buffer=name)
    client.publish_policy_version(5, buffer=name)
    with pytest.raises(PushRefusedError, match="version 6 is newer than the published version 5"):
        client.push([of_version(0, 1, 6)], buffer=name)
    result = client.push(
        [of_version(0, 1, 6), of_version(0, 2, 5)], buffer=name, raise_on_refused=False
    )
    assert [outcome.reason for outcome in result.outcomes] == ["future_version", ""]
    assert runs(client.sample(2, buffer=name, min_batch_size=1, timeout=0)) == [2]
    assert states(client, name) == ["held", "leased"], "what was stored before is held"


def test_versions_of_the_future_are_delivered_where_that_is_set(client: Client, name: str) -> None:
    create(client, name, staleness=Staleness(max_lag=0), on_future_version="deliver")
    client.publish_policy_version(5, buffer=name)
    client.push([of_version(0, 0, 9)], buffer=name)
    batch = client.sample(1, buffer=name)
    assert batch.staleness == (-4,)


# --- watching the version


def test_watchers_see_the_version_now_and_every_change(client: Client, name: str) -> None:
    client.create_buffer(name)
    with client.watch_policy_version(name) as versions:
        assert next(versions) is None
        for version in (3, 7, 2):  # A rollback, too.
            client.publish_policy_version(version, buffer=name)
            assert next(versions) == version


def test_a_watch_ends_with_its_buffer(client: Client, name: str) -> None:
    with pytest.raises(BufferNotFoundError):
        next(client.watch_policy_version("no-such"))
    client.create_buffer(name)
    with client.watch_policy_version(name) as versions:
        assert next(versions) is None
        client.delete_buffer(name)
        with pytest.raises(BufferNotFoundError, match=f"no buffer '{name}'"):
            next(versions)
