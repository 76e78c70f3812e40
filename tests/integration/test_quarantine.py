"""Experiences that kill their consumer: delivered so often, then kept away from it."""

from __future__ import annotations

import pytest

from experience_buffer import Client, ExperienceNotFoundError
from tests.integration.buffers import create, states, trainer
from tests.integration.plain import group, uid
from tests.integration.server import Stub, eventually
from tests.integration.streams import speaking


def quarantined(client: Client, name: str) -> int:
    """How many units are kept from the trainer."""
    return trainer(client, name).num_quarantined_units


def wait_for_returns(client: Client, name: str, count: int) -> None:
    """Wait until so many deliveries have ended without an ack."""
    eventually(lambda: trainer(client, name).num_redelivered_units == count, "a lease to end")


def test_after_so_many_deliveries_it_is_kept_away_and_listed(client: Client, name: str) -> None:
    create(client, name, max_deliveries=2)
    client.push(group(0, 3), buffer=name)
    for number in (1, 2):
        batch = client.sample(1, buffer=name)
        assert (batch.uids, batch.num_deliveries) == ((uid(0, 0),), (number,))
        batch.nack("out of memory")
    others = client.sample(2, buffer=name)
    assert others.uids == (uid(0, 1), uid(0, 2))
    assert quarantined(client, name) == 1
    assert states(client, name) == ["quarantined", "leased", "leased"]
    (listed,) = client.list(state="quarantined", buffer=name)
    assert listed.uid == uid(0, 0)
    assert "delivered 2 times to 'trainer' without an acknowledgement" in listed.message
    assert "nacked" in listed.message
    nothing = client.sample(1, buffer=name, timeout=0)
    assert "1 quarantined after too many deliveries; see release_quarantined" in nothing.shortfall


@pytest.mark.parametrize("way", ["expired", "stream_closed"])
def test_a_consumer_that_dies_counts_like_one_that_complains(
    client: Client, stub: Stub, name: str, way: str
) -> None:
    create(client, name, max_deliveries=2)
    client.push(group(0, 1), buffer=name)
    for number in (1, 2):
        if way == "expired":
            client.sample(1, buffer=name, lease_seconds=0.05)
        else:
            with speaking(stub) as stream:
                stream.open(name, 1, credits=1)
                assert stream.batch().uids == [uid(0, 0)]
        wait_for_returns(client, name, number)
    assert quarantined(client, name) == 1
    (listed,) = client.list(state="quarantined", buffer=name)
    assert f"the last one {way.replace('_', ' ')}" in listed.message


def test_a_released_one_comes_again_with_its_deliveries_forgotten(
    client: Client, name: str
) -> None:
    create(client, name, max_deliveries=2)
    client.push(group(0, 3), buffer=name)
    for _ in range(2):
        client.sample(3, buffer=name).nack()
    assert quarantined(client, name) == 3
    assert client.release_quarantined([uid(0, 1)], buffer=name) == 1
    batch = client.sample(1, buffer=name)
    assert (batch.uids, batch.num_deliveries) == ((uid(0, 1),), (1,))
    with pytest.raises(ExperienceNotFoundError, match="isn't quarantined for consumer 'trainer'"):
        client.release_quarantined([uid(0, 1)], buffer=name)
    with pytest.raises(ExperienceNotFoundError, match="1 units of the others are offered again"):
        client.release_quarantined([uid(0, 1), "nobody", uid(0, 2)], buffer=name)
    assert client.release_quarantined(buffer=name) == 1, "all that are left"
    assert client.sample(2, buffer=name).uids == (uid(0, 0), uid(0, 2))
